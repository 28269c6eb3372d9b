"""Presets for train/run.py: one file each, with one function that returns a full Config."""
