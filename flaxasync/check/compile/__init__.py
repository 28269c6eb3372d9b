"""Compiling for TPU topologies on a machine without a TPU."""
