"""Text: the vocabulary and its encoder, incremental output with stop sequences, chat prompts."""
