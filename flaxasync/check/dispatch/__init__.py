"""Whether a call of a compiled function returns at once, or holds the host until the devices are
done.
"""
