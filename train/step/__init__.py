"""The compiled training step, its mesh, and what surrounds it."""
