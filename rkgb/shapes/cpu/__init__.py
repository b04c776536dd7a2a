"""What kernels of the CPU allocate for themselves and free again."""
