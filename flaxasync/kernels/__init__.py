"""Fused Pallas TPU kernels: Refs in, DMAs and matmuls inside, no policy. The ops above choose among them.

Files: `gemm`, `all_gather`, `reduce` (reduce-scatter and all-reduce), each alone; `all_gather_matmul` (with `gather/`),
`matmul_reduce_scatter` (with `reduce_walk`) and `gather_outer` (with `outer_walk`), which multiply and move; `mesh/`,
the same on two axes; `tiles`, `row_tiles` and `neighbours`, what all of them check and need.
"""
