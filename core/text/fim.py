"""The fill-in-the-middle prompt."""

from __future__ import annotations


def fim_prompt(prefix: str, suffix: str) -> str:
    """A prompt whose continuation belongs between `prefix` and `suffix`; it ends with end-of-text."""
    return f"✿prefix✿✿suffix✿{suffix}✿middle✿{prefix}"
