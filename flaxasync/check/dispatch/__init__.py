"""Whether a call of a compiled function returns at once, or holds the host until the devices are done.

command_buffers    XLA flags with which a GPU runs while loops by itself
signals            reads what in a compiled function can make the host wait
compatibility      `check_async_compatible`: says whether a call makes the host wait, and why
timing             `measure_dispatch`: measures how long a call makes the host wait
"""
