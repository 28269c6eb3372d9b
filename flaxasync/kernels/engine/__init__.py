"""What all kernels are built from. A kernel file adds its own schedule and its own protocol between devices.

| file | what it has |
|---|---|
| `refs` | types of what a kernel body handles |
| `operands` | hardware tiles, the sizes of matmul tiles, the checks of operands |
| `vmem` | how much vector memory a kernel needs, and the error where it needs too much |
| `grid` | the order in which tiles are visited |
| `tiling` | tiles of one dimension, tiles of rows in batches; the last ones may be partial |
| `slots` | tiles on their way into vector memory or out of it; the start of and the wait for every transfer |
| `call` | the call of a kernel whose operands and results stay in HBM |
| `product` | the product of two tiles and its accumulation over the contraction |
| `matmul` | the tiles of x and w: fetch, wait, multiply |
| `epilogue` | what a kernel makes of finished products before they leave vector memory |
| `ring` | neighbours on a mesh axis, the entry barrier, half-blocks, acknowledgements |
| `gather` | an all-gather along a ring inside a kernel, into HBM or into vector memory |
"""
