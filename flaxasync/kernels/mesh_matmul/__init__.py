"""The kernels of `flaxasync.mesh_matmul` on X x Y devices.

In `fused` w travels while it is multiplied. In `overlapped` partial sums and results travel, too: `schedule` has its
order of work. `weights` says for both kernels which block of w goes where, and has the transfers of `overlapped`.
"""
