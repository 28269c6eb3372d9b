"""The kernels of `flaxasync.mesh_matmul` on X x Y devices, and what they are made of.

Files: `fused` (w travels while it is multiplied) and `overlapped` (sums and results travel, too); `pieces` (which part
of w goes where), `walk` (the order of work), `weights` and `sums` (the streams beside it), `scratch` (what it holds).
"""
