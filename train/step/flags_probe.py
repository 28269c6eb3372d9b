"""The process that `train.step.flags` starts: it ends with code 0 if libtpu takes the flags of
LIBTPU_INIT_ARGS.

libtpu itself ends a process that has a flag which it does not know. The argument is a topology,
such as v6e:2x2.
"""

import sys


def main(topology: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flaxasync.check.compile.topologies import topology_devices

    mesh = jax.sharding.Mesh(np.array(topology_devices(topology)), ("devices",))
    rows = jax.P("devices")
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=jax.NamedSharding(mesh, rows))

    def gather_and_multiply(x: jax.Array) -> jax.Array:
        return x @ jax.lax.all_gather(x, "devices", tiled=True)

    jax.jit(jax.shard_map(gather_and_multiply, mesh=mesh, in_specs=rows, out_specs=rows)).lower(
        x
    ).compile()


if __name__ == "__main__":
    main(sys.argv[1])
