"""Turns plain models into parallel ones: replaces layers by their paths, and puts arrays under
their shardings.
"""
