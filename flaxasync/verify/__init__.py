"""Verifies the ops and their kernels on the devices of this machine: are the results right, and how fast are they?

`python -m flaxasync.verify` is the command. A kernel that overlaps transfers can hang a chip, or be silently wrong, so
every case runs in a child process with a time limit, and is compared with the formula of its op on whole arrays.
"""
