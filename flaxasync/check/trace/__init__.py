"""Measured programs: what a profile of `jax.profiler` says about time, beside the estimate of the
same program.
"""
