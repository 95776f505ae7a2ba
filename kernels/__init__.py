"""The kernels: for each a plain PyTorch reference, and faster forms of the same signature for a kind of device."""
