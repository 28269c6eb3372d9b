"""The kernels of a `Pair` while they are traced, which needs no simulator and no compiler."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from flaxasync.transport import Pair


def test_the_kernels_of_a_pair_are_traced_once_for_the_same_types():
    traced = []

    def begin(x_ref, y_ref, sem):
        traced.append("start")
        pltpu.make_async_copy(x_ref, y_ref, sem).start()

    def wait(x_ref, y_ref, sem):
        traced.append("done")
        pltpu.make_async_copy(x_ref, y_ref, sem).wait()

    pair = Pair("copy", begin, wait)

    def copied(x):
        return pair.done(*pair.start(x))

    jax.eval_shape(lambda x: copied(copied(x)), jax.ShapeDtypeStruct((8, 128), jnp.float32))
    assert traced == ["start", "done"]
    jax.eval_shape(copied, jax.ShapeDtypeStruct((16, 128), jnp.float32))
    assert traced == ["start", "done"] * 2, "another shape has kernels of its own"
