"""The gate: compares a compiled program with a baseline in a file, by what matters and not by its text.

summary          `summarize`: what matters of a program, in rows that do not change with its names and its order
baseline         a summary as a JSON file
comparison       `compare`: what changed for the worse and for the better, with source lines
command          `python -m flaxasync.check gate`
pytest_plugin    the fixture `check_overlap`
"""
