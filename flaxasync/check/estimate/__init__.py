"""Estimates the times of a compiled program from its text alone. Nothing is run, and nothing here imports JAX.

collective_time    how long a collective takes on idle links
costs              how long each instruction takes
timeline           the data of a timeline: what runs when on each device
lockstep           steps through the program and writes the slices of a timeline
estimator          `timeline`, the public function
trace, picture     a timeline as a file
phases             which part of a training step an instruction belongs to
"""
