"""`python -m flaxasync.verify`: verifies the ops and their kernels on the devices of this
machine.
"""
