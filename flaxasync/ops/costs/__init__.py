"""What `flaxasync.plan` ranks: for each op a roofline of every backend, from shapes, ring size and chip.

Files: `cost` (what a backend is predicted to take); `attention`, `collective_matmul` and `mesh_matmul` (the ops); of
the collective matmuls `passes` (what they are made of), `serial`, `rings` and `fused` (their backends).
"""
