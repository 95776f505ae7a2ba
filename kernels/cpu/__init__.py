"""C++ kernels for the CPU, built once with ninja into a per-user cache and called through ctypes."""
