"""The kernels of `flaxasync.mesh_matmul` on X x Y devices.

In `fused` w travels while it is multiplied. In `overlapped` partial sums and results travel, too: `schedule` has its
order of work, `weights` the transfers of w. `blocks` says for both kernels which part of w goes where.
"""
