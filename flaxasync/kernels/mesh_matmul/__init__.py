"""The kernels of `flaxasync.mesh_matmul`."""
