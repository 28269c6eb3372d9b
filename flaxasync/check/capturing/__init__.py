"""Captures every program that a process compiles, and summarises a run."""
