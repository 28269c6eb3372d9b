"""The kernel of `flaxasync.mesh_matmul` on X x Y devices: `overlapped`, its `schedule`, and its
blocks of `weights`.
"""
