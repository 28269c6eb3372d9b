"""Attention: the public ops, their VJP rule, and the loops that move keys and values."""
