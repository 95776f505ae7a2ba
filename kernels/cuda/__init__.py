"""CUDA C++ kernels, built at first use for the card that is there."""
