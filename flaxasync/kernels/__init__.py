"""Pallas TPU kernels: arrays in HBM in, transfers and matmuls inside, no policy. The ops above
choose among them.

| module | kernel |
|---|---|
| `gemm` | x @ w on one device |
| `collectives` | all-gather and all-reduce alone |
| `all_gather_matmul` | all_gather(x) @ w |
| `matmul_reduce_scatter` | reduce_scatter(x @ w); weight gradients of the device beside it |
| `weight_gradient` | all_gather(x).T @ dy, the weight gradient of `all_gather_matmul` |
| `mesh_matmul` | a matmul on two mesh axes |
| `flash_attention` | attention of a block of queries to a block of keys (`attention_block`) |
| `rotate_heads` | rotary positions of heads that lie side by side |
| `grouped_matmul` | rows that are sorted by expert, times the weights of their experts |
| `grouped_weight_gradient` | the weight gradients of `grouped_matmul` |
| `add_rows` | rows that are added to those rows of an array which an index names |

They share `engine`, and those with transfers are for use inside `jax.shard_map`, on local shards.
The ops have checked the operands: float32 or bfloat16, all of one dtype, or x and w of 8 bits with
scales where a kernel takes those; each batch in whole hardware tiles; on axes of two devices or
more, and of no more than the kernel has semaphores for. Beside what its docstring names, a kernel
refuses only tiles that exceed the chip's vector memory, with a ValueError. These arguments mean the
same in each kernel:

```
tiles          the largest tiles of a product, of which the last may be partial; None: chosen
directions     1, or 2 to send half of what travels each way around the ring
cores          the cores of a device that share out the work, where a kernel has it; None: chosen
collective_id  the id of the entry barrier; by default one that no other kernel of the program has
```
"""
