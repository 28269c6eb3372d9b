"""Checks the values of `mesh_matmul` on 4x4 devices, in a process of its own, because those of the
tests have eight.

It prints a line for each backend whose values are right.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.ops.test_mesh_matmul import SPECS, check_gradients, parity

SIDE = 4
KERNELS = (("xla_gemm", None), ("serial", 2), ("fused", 1), ("overlapped", 1), ("overlapped", 2))


def main():
    jax.config.update("jax_num_cpu_devices", SIDE * SIDE)
    mesh = jax.make_mesh((SIDE, SIDE), ("x", "y"))
    with jax.set_mesh(mesh):
        fn = jax.shard_map(fa.mesh_matmul, in_specs=SPECS, out_specs=P("x", None))
        check_gradients(mesh, fn, m=16, k=64, n=8)
    print("none: o, dlhs, drhs", flush=True)
    for backend, directions in KERNELS:
        shape = {"m": 256, "k": 2048, "n": 256}
        parity((SIDE, SIDE), "eager", races=False, backend=backend, directions=directions, **shape)
        print(f"{backend}, directions={directions}: o", flush=True)


if __name__ == "__main__":
    main()
