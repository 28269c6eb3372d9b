"""How many functions of the package a reader steps through, from a layer to the operation that it ends in."""

import pathlib
import traceback

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import mesh as ambient_mesh

PACKAGE = pathlib.Path(fa.__file__).parent


class ReachedError(Exception):
    """The operation was reached; the message has a line for each function of the package on the way."""


def stop(*_, **__):
    frames = [frame for frame in traceback.extract_stack() if pathlib.Path(frame.filename).is_relative_to(PACKAGE)]
    raise ReachedError("\n".join(f"{frame.filename}:{frame.name}" for frame in frames))


@pytest.mark.parametrize(("backend", "operation", "most"), [
    ("xla", (lax, "ppermute"), 9), ("fused", (pl, "pallas_call"), 7),
])  # fmt: skip
def test_from_a_layer_to_its_operation(mesh_of, monkeypatch, backend, operation, most):
    monkeypatch.setattr(*operation, stop)
    monkeypatch.setattr(ambient_mesh, "platform", lambda: "tpu")
    options = {"dtype": jnp.bfloat16, "backend": backend}
    with jax.set_mesh(mesh_of(2, 4)):
        layer = nnx.eval_shape(lambda: fa.nn.ColumnParallelLinear(1024, 2048, rngs=nnx.Rngs(0), **options))
        graph, state = nnx.split(layer)
        sharding = jax.NamedSharding(jax.sharding.get_mesh(), P("data", "model", None))
        x = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16, sharding=sharding)
        with pytest.raises(ReachedError) as reached:
            jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x), state, x)
    assert len(str(reached.value).splitlines()) <= most, str(reached.value)
