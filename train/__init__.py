"""The training script and its modules. `python train/run.py` is the entry point."""
