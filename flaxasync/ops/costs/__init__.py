"""The costs that `flaxasync.plan` ranks: for each op a roofline of every backend, from shapes, ring
size and chip.
"""
