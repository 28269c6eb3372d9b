"""Checkpoints: what they hold, when they are saved, and how a run continues from one."""
