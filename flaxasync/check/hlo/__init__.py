"""Compiled programs as data: reads and writes HLO text, and answers questions about it.

Nothing in this folder knows about times, and nothing in it imports JAX to read a text.
"""
