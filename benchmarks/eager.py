"""How long a layer takes outside of `jax.jit`, after its first call: `python benchmarks/eager.py`.

The layers lie on 2 x 4 simulated CPU devices, with an input [8, 16, 32], so that the time is that of the host.
"""

import statistics
import time

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa

ROWS, COLUMNS, TOKENS = P("data", "model", None), P("data", None, "model"), P("data", None)
LAYERS = {
    "ColumnParallelLinear": (lambda: fa.nn.ColumnParallelLinear(32, 64, rngs=nnx.Rngs(0)), ROWS),
    "RowParallelLinear": (lambda: fa.nn.RowParallelLinear(32, 64, rngs=nnx.Rngs(0)), COLUMNS),
    "ParallelMLP": (lambda: fa.nn.ParallelMLP(32, 64, rngs=nnx.Rngs(0)), ROWS),
    "ParallelSelfAttention": (lambda: fa.nn.ParallelSelfAttention(32, 4, rngs=nnx.Rngs(0)), ROWS),
    "VocabParallelEmbed": (lambda: fa.nn.VocabParallelEmbed(64, 32, rngs=nnx.Rngs(0)), TOKENS),
}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    print("| layer | first call | later calls, median |\n|---|---:|---:|")
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
        for name, (make, spec) in LAYERS.items():
            layer = make()
            x = np.zeros((8, 16), np.int32) if spec == TOKENS else np.ones((8, 16, 32), np.float32)
            x = jax.device_put(x, spec)
            seconds = []
            for _ in range(20):
                start = time.perf_counter()
                jax.block_until_ready(layer(x))
                seconds.append(time.perf_counter() - start)
            print(f"| `{name}` | {seconds[0]:.2f} s | {statistics.median(seconds[1:]) * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
