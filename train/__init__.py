"""The training script and its parts: `python train/run.py` is the way in."""
