"""Presets for train/run.py. Each file has one function, which returns a complete Config."""
