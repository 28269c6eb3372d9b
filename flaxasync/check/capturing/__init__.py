"""Captures every program that a process compiles, and summarises a run.

The folder is not called capture, because a module of that name would hide the public function
`flaxasync.check.capture`.

programs     the data: a captured program, and a folder of them
recorder     `capture`, which records what JAX compiles in this process
overview     what a folder of programs communicates: the worst transfers over all of them
command      `python -m flaxasync.check capture FOLDER -- script.py`
"""
