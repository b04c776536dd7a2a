"""Operations by other kernels of PyTorch's than those it picks, where they are measured to be faster."""
