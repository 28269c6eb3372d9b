"""Fused Pallas TPU kernels: Refs in, DMAs and matmuls inside, no policy. `flaxasync.mesh_matmul` chooses among them.

Files: `gemm`, `all_gather`, `reduce` (reduce-scatter and all-reduce), each alone; `fused` and `overlapped`, several in
one, the latter with `walk`, its order of work, and `scratch`, what it holds; `tiles` and `neighbours`, what all of them
check and need.
"""
