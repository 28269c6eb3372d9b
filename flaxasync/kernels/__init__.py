"""Pallas TPU kernels: arrays in HBM in, transfers and matmuls inside, no policy. The ops above choose among them.

| module | kernel |
|---|---|
| `gemm` | x @ w on one device |
| `collectives` | all-gather, reduce-scatter and all-reduce alone |
| `all_gather_matmul` | all_gather(x) @ w |
| `matmul_reduce_scatter` | reduce_scatter(x @ w) |
| `weight_gradient` | all_gather(x).T @ dy, the weight gradient of `all_gather_matmul` |
| `mesh_matmul` | a matmul on two mesh axes |
| `flash_attention` | attention between one block of queries and one block of keys, as `attention_block` defines it |

All of them but the last are built from `engine`.
"""
