"""A run from its start to its end: its folder, its loop, signals, and how it ends."""
