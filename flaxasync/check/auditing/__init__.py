"""The audit of a compiled program: whether its transfers overlap with work, and whether they are
safe.

The folder is not called audit, because a module of that name would hide the public function
`flaxasync.check.audit`.
"""
