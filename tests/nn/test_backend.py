"""A backend that is unknown, or that the devices lack, is an error also where nothing travels."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import flaxasync as fa
from flaxasync.mesh import UnsupportedError
from tests.nn.conftest import COLUMNS, ROWS, SAME, TOKENS, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")
LAYERS = {
    "ColumnParallelLinear": (
        lambda **o: fa.nn.ColumnParallelLinear(16, 16, rngs=nnx.Rngs(0), **o),
        (ROWS, SAME),
    ),
    "RowParallelLinear": (
        lambda **o: fa.nn.RowParallelLinear(16, 16, rngs=nnx.Rngs(0), **o),
        (COLUMNS,),
    ),
    "ColumnParallelProjections": (
        lambda **o: fa.nn.ColumnParallelProjections(16, {"q": 16, "k": 16}, rngs=nnx.Rngs(0), **o),
        (ROWS, SAME),
    ),
    "ParallelMLP": (lambda **o: fa.nn.ParallelMLP(16, 16, rngs=nnx.Rngs(0), **o), (ROWS, SAME)),
    "ParallelMoE": (
        lambda **o: fa.nn.ParallelMoE(16, 16, 4, experts_per_token=2, rngs=nnx.Rngs(0), **o),
        (ROWS, SAME),
    ),
    "ParallelAttention": (
        lambda **o: fa.nn.ParallelAttention(16, 4, rngs=nnx.Rngs(0), **o),
        (ROWS, SAME),
    ),
    "ParallelSelfAttention": (
        lambda **o: fa.nn.ParallelSelfAttention(16, 4, rngs=nnx.Rngs(0), **o),
        (ROWS, SAME),
    ),
    "RingSelfAttention": (
        lambda **o: fa.nn.RingSelfAttention(16, 4, axis_name="model", rngs=nnx.Rngs(0), **o),
        (ROWS,),
    ),
    "VocabParallelEmbed": (
        lambda **o: fa.nn.VocabParallelEmbed(16, 16, rngs=nnx.Rngs(0), **o),
        (TOKENS,),
    ),
    "replicated VocabParallelEmbed": (
        lambda **o: fa.nn.VocabParallelEmbed(16, 16, layout="replicated", rngs=nnx.Rngs(0), **o),
        (TOKENS,),
    ),
    "attend": (lambda **o: fa.nn.VocabParallelEmbed(16, 16, rngs=nnx.Rngs(0), **o), (ROWS, SAME)),
}


def call(name, layer, spec):
    shape = (2, 8) if spec == TOKENS else (2, 8, 16)
    x = jax.ShapeDtypeStruct(shape, jnp.int32 if spec == TOKENS else jnp.float32, sharding=spec)
    return nnx.eval_shape(
        lambda layer, x: layer.attend(x) if name == "attend" else layer(x), layer, x
    )


# on one device nothing travels
@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_backend_that_cannot_run_is_refused(name, devices):
    make, specs = LAYERS[name]
    with jax.set_mesh(make_mesh(2, devices)):
        for spec in specs:
            for backend, error, message in (
                ("ppermute", ValueError, "got backend='ppermute': it must be one of none, xla"),
                (
                    "pallas",
                    UnsupportedError,
                    r"backend='pallas' is made of TPU kernels, and this mesh is of cpu devices",
                ),
            ):
                layer = nnx.eval_shape(lambda backend=backend: make(backend=backend))
                with pytest.raises(error, match=message):
                    call(name, layer, spec)
            assert call(name, nnx.eval_shape(lambda: make(backend="xla")), spec) is not None


def test_a_backend_that_only_experts_have_is_refused():
    """`fa.expert_mlp` has the backend "exchange", and no matmul of an MLP does."""
    with jax.set_mesh(make_mesh(2, 4)):
        mlp = nnx.eval_shape(
            lambda: fa.nn.ParallelMLP(16, 16, backend="exchange", rngs=nnx.Rngs(0))
        )
        with pytest.raises(UnsupportedError, match="matmul_all_reduce has no 'exchange' backend"):
            call("ParallelMLP", mlp, SAME)


def test_a_backend_of_split_sequences_must_exist_where_they_are_whole():
    with (
        jax.set_mesh(make_mesh(2, 4)),
        pytest.raises(ValueError, match="ring_attention got backend='ppermute'"),
    ):
        fa.nn.ParallelAttention(16, 4, context_backend="ppermute", rngs=nnx.Rngs(0))
