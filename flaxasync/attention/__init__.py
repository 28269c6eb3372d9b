"""The Pallas kernels of attention."""
