"""The kernels of GPUs in Triton, one source for NVIDIA and AMD; the code that runs on a device is in device/."""
