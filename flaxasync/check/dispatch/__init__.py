"""Whether a call of a compiled function holds the host."""
