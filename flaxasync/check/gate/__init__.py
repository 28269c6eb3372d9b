"""The gate: compares a compiled program with a baseline in a file, by what matters and not by its
text.
"""
