"""What all kernels are built from. A kernel file adds its own schedule and its own protocol between
devices.

| file | what it has |
|---|---|
| `operands` | types of what a kernel body handles, hardware tiles, the sizes of matmul tiles |
| `vector_memory` | the vector memory that the tiles of a kernel need, and its error |
| `tiling` | the order in which tiles are visited; tiles of a dimension, or of rows in batches |
| `slots` | tiles on their way in or out; the start of every transfer, and the wait |
| `matmul` | the tiles of x and w: fetch, wait, multiply, accumulate; epilogues; scales of 8-bit values |
| `cores` | the cores of a device that run a kernel, and the part of each |
| `ring` | neighbours on a mesh axis, the entry barrier, half-blocks, acknowledgements |
| `beside` | weight gradients of one device between the steps of another kernel |
| `gather` | an all-gather along a ring inside a kernel, into HBM or into vector memory |
"""
