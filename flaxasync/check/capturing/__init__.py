"""Captures every program that a process compiles, and summarises a run.

The folder is not called capture, because a module of that name would hide the public function
`flaxasync.check.capture`.
"""
