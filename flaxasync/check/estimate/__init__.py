"""Estimates the times of a compiled program from its text alone. Nothing is run, and nothing here imports JAX.

costs, moved_bytes     how long each instruction takes, and the bytes that it moves
timeline, picture      the data of a timeline: what runs when on each device; and its picture
lockstep               steps through the program and writes the slices of a timeline
estimator              `timeline`, without simulated kernels; what an estimate does not know
phases                 which part of a training step an instruction belongs to
"""
