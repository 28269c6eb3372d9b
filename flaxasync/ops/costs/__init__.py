"""The costs that `flaxasync.plan` ranks: for each op a roofline of every backend, from shapes, ring size and chip.

`cost` is what a backend is predicted to take. `attention`, `collective_matmul` and `mesh_matmul` are the ops. The
collective matmuls are made of `trips`; `serial`, `rings` and `fused` are what their backends take for those.
"""
