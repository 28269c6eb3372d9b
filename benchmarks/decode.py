"""What a token costs with the cache at two positions: `python benchmarks/decode.py`.

A decoder with a cache of 2048 tokens decodes one token after 100 and after 2000 others, by turns in one process, on one
CPU device. The attention reads the whole cache at either position and masks what is not there yet, so the two times
should be equal. The third row is the same decoder with a cache of 128 tokens: what is left when nearly all of the
attention is taken away.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import TransformerConfig
from models.transformer import Transformer

CONFIG = TransformerConfig(vocab_size=4096, layers=4, width=512, heads=8, kv_heads=2, mlp_width=1408)
TURNS = 100


def main() -> None:
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])):
        model = Transformer(CONFIG, rngs=nnx.Rngs(0))
        cases = {(2048, 100): [], (2048, 2000): [], (128, 100): []}
        calls = {case: decoder(model, *case) for case in cases}
        for turn in range(TURNS + 5):
            for case, call in calls.items():
                start = time.perf_counter()
                call()
                if turn >= 5:
                    cases[case].append(time.perf_counter() - start)
    medians = {case: statistics.median(seconds) for case, seconds in cases.items()}
    print("| cache | position | time a token, median | ratio to position 100 |\n|---:|---:|---:|---:|")
    for (length, position), seconds in medians.items():
        print(f"| {length} | {position} | {seconds * 1e3:.2f} ms | {seconds / medians[2048, 100]:.2f} |")


def decoder(model: Transformer, length: int, position: int) -> Callable[[], None]:
    """Returns a function that decodes one token at a position, with a cache of its own."""
    model.init_cache(1, length)
    index = model.layers.attention.cache_index
    index[...] = jnp.full_like(index[...], position)
    graph, params, cache = nnx.split(model, nnx.Param, nnx.Cache)
    cache, token = jax.tree.map(jnp.copy, cache), np.zeros((1, 1), np.int32)

    @jax.jit
    def run(params: nnx.State, cache: nnx.State) -> jax.Array:
        return nnx.merge(graph, params, cache).decode(token)

    return lambda: jax.block_until_ready(run(params, cache))


if __name__ == "__main__":
    main()
