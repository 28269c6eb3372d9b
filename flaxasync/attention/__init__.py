"""What ring attention is made of: layouts, the product of two blocks, its kernels, the passes and their rules."""
