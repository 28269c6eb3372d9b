"""Fused Pallas TPU kernels: Refs in, DMAs and matmuls inside, no policy. The ops above choose among them.

Files: `gemm`, `all_gather`, `reduce` (reduce-scatter and all-reduce), each alone; `all_gather_matmul` (with `gather/`),
`matmul_reduce_scatter` (with `reduce_walk` and `reduce_body`) and `gather_outer` (with `outer_walk` and `outer_body`),
which multiply and move; `mesh/`, the same on two axes; `cut`, sides in tiles of which the last may be narrower;
`tiles`, `row_tiles` and `neighbours`, what all of them check and need.
"""
