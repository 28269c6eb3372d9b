"""Estimated times of a compiled program: per instruction, as a timeline, as a trace file and as a picture."""
