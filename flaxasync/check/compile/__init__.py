"""Compiling for TPU topologies on a machine without a TPU. worker.py is the child process that
compiles.
"""
