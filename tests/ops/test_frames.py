"""How many functions of this package lie between a call and XLA's permute, or a Pallas kernel: a traceback is short."""

import os
import traceback

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check

PACKAGE = os.path.dirname(fa.__file__) + os.sep


def shortest(monkeypatch, module, name, mesh, backend):
    """Returns the frames of this package above the nearest call of `module.name` in an `all_gather_matmul`."""
    original, found = getattr(module, name), []

    def recorded(*args, **options):
        found.append([f"{frame.filename.removeprefix(PACKAGE)}: {frame.name}" for frame in traceback.extract_stack()
                      if frame.filename.startswith(PACKAGE)])  # fmt: skip
        return original(*args, **options)

    monkeypatch.setattr(module, name, recorded)
    with jax.set_mesh(mesh):
        fn = jax.shard_map(
            lambda x, w: fa.all_gather_matmul(x, w, "model", backend=backend),
            in_specs=(P("model"), P(None, "model")),
            out_specs=P(None, "model"),
        )
        jax.eval_shape(fn, *(jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),) * 2)
    return min(found, key=len)


@pytest.mark.parametrize(
    ("module", "name", "backend", "most"), [(lax, "ppermute", "xla", 7), (pl, "pallas_call", "fused", 5)]
)
def test_from_an_op_to_its_transfer(monkeypatch, module, name, backend, most):
    frames = shortest(monkeypatch, module, name, check.topology_mesh("v5e:2x4", (8,), ("model",)), backend)
    assert len(frames) <= most, frames
