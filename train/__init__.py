"""The training script and its modules. `python train/run.py` is the entry point."""

import time

BEGAN = time.monotonic()
"""Moment at which the process began, by `time.monotonic`: train/run.py imports this file before anything slow."""
