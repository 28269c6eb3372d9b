"""Attention over sequences that are split over a mesh axis, and over whole ones."""
