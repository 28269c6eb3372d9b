"""The code of docs/async.md runs as it stands, on simulated TPUs, and gives the values that the
page promises.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.simulator.split_pairs import session

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "async.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RIGHT = [block for block in BLOCKS if "Fragment: wrong" not in block]
HOPS, SIZE = 5, 4


def block_with(name):
    (found,) = (block for block in RIGHT if name in block)
    return found


def run(block, names, **given):
    """Runs a block in `jax.shard_map` over "model" on small integers; returns them, and what it
    leaves in `names`.
    """
    blocks = np.random.default_rng(0).integers(-4, 4, (SIZE, 128, 128)).astype(np.float32)

    def on_each(x):
        scope = {"fa": fa, "jax": jax, "jnp": jnp, "x": x[0], "hops": HOPS, **given}
        exec(compile(block, "docs/async.md", "exec"), scope)
        return [scope[name][None] for name in names]

    mesh = jax.make_mesh((SIZE,), ("model",), devices=jax.devices()[:SIZE])
    with jax.set_mesh(mesh), session(mode="eager") as report:
        mapped = jax.jit(jax.shard_map(on_each, in_specs=P("model"), out_specs=P("model")))
        results = [np.asarray(result) for result in mapped(jax.device_put(blocks, P("model")))]
    assert report.problems() == set()
    return blocks, results


LOOPS = (
    "lax.fori_loop(0, hops - 1, turn, carry, unroll=2)",
    "ppermute_start_slots",
    "ppermute_start_stateful",
)


def test_every_block_is_tested_here():
    assert len(RIGHT) == len(LOOPS) + 2
    assert len(BLOCKS) == len(RIGHT) + 1  # the wrong form; test_touched_in_flight.py compiles it


@pytest.mark.parametrize("name", LOOPS)
def test_the_right_forms(name):
    blocks, (y, seen) = run(block_with(name), ("y", "seen"))
    np.testing.assert_array_equal(y, np.roll(blocks, HOPS, axis=0))
    np.testing.assert_array_equal(seen, sum(np.roll(blocks, hop, axis=0) for hop in range(HOPS)))


def test_the_first_block():
    w = jnp.eye(128) * 2
    blocks, (y, z) = run(block_with("z = x @ w"), ("y", "z"), w=w)
    np.testing.assert_array_equal(y, np.roll(blocks, 1, axis=0))
    np.testing.assert_array_equal(z, 2 * blocks)


def test_a_slice_that_the_next_turn_needs():
    w = jnp.stack([jnp.eye(128) * layer for layer in (1, 2, 3)])
    blocks, (y, w_layer) = run(block_with("slice_start"), ("y", "w_layer"), w=w, w_layer=w[0], i=0)
    np.testing.assert_array_equal(y, blocks)
    np.testing.assert_array_equal(w_layer, np.broadcast_to(w[1], w_layer.shape))
