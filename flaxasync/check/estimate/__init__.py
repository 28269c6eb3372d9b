"""Estimates the times of a compiled program from its text alone. Nothing is run, and nothing here
imports JAX.
"""
