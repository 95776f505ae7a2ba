"""What runs on a GPU, and through Triton's interpreter on a CPU. Each module's callers are in the folder above."""
