"""The audit of a compiled program: whether its transfers overlap with work, and whether they are safe."""
