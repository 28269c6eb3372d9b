"""Estimates the times of a compiled program from its text alone. Nothing is run, and nothing here imports JAX.

collective_time        how long a collective takes on idle links
costs, moved_bytes     how long each instruction takes, and the bytes that it moves
timeline, picture      the data of a timeline: what runs when on each device; and its picture
lockstep               steps through the program and writes the slices of a timeline
limits                 what an estimate does not know
estimator              `timeline`, without simulated kernels
phases                 which part of a training step an instruction belongs to
"""
