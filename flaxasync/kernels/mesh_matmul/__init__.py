"""The kernel of `flaxasync.mesh_matmul` on X x Y devices.

In `overlapped` w, partial sums and results travel while tiles are multiplied. `schedule` has its order of work, and
`weights` says which block of w goes where, and has its transfers.
"""
