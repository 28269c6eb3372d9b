"""Verifies the ops and their kernels on the devices of this machine: are the results right, and how fast are they?

`python -m flaxasync.verify` is the command. A kernel that overlaps transfers can hang a chip, or be silently wrong, so
every case runs in a child process with a time limit, and is compared with the same op made of XLA's own collectives.

  cases        what is verified: an op, a backend, directions, shapes
  platform     known defects of the platform, as programs that show them
  programs     the program of a case and of its reference, as jitted functions of global arrays
  measure      compares results, and reads the device time of a program from a profile
  child        the process that runs cases, one after the other
  pod          what the children of several hosts do together
  supervisor   starts such processes, and ends them when a case takes too long
  verdict      what came of a case, and the report
  predict      what the simulator says about the same program
  rehearsal    values and times without a TPU, and verdicts that no run trusts
"""
