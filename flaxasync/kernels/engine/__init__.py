"""What all kernels are built from. A kernel file adds its own schedule and its own protocol between
devices.

| file | what it has |
|---|---|
| `operands` | types of what a kernel body handles, hardware tiles, the sizes of matmul tiles |
| `call` | the call of a kernel; how much vector memory its tiles need, and the error where that is too much |
| `tiling` | the order in which tiles are visited; tiles of a dimension, or of rows in batches |
| `slots` | tiles on their way into vector memory or out of it; the start of and the wait for every transfer |
| `matmul` | the tiles of x and w: fetch, wait, multiply, and accumulate over the contraction; epilogues |
| `ring` | neighbours on a mesh axis, the entry barrier, half-blocks, acknowledgements |
| `beside` | weight gradients of one device, computed between the steps of a kernel that waits for links |
| `gather` | an all-gather along a ring inside a kernel, into HBM or into vector memory |
"""
