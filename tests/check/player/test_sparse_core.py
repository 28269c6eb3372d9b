"""Collectives that tpu7x offloads to its SparseCores: refused, with the options that keep them on the TensorCore."""

import ast

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import play, topology_mesh
from flaxasync.check.auditing.advice import OFFLOAD_FLAGS
from flaxasync.check.player.errors import UnknownOperationError

TOPOLOGY = "tpu7x:2x2x1"


def test_the_refusal_names_the_options_with_which_it_can_be_simulated():
    mesh = topology_mesh(TOPOLOGY, (8,), ("x",))
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    gather = jax.shard_map(
        lambda x: lax.all_gather(x, "x", tiled=True), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False
    )
    with pytest.raises(UnknownOperationError, match="drives a SparseCore, which the player does not model") as refused:
        play(jax.jit(gather), x, topology=TOPOLOGY)
    options = ast.literal_eval(str(refused.value).rpartition("compiler_options=")[2])
    assert options == {flag.removesuffix("=true"): "false" for flag in OFFLOAD_FLAGS.values()}
    assert play(jax.jit(gather), x, topology=TOPOLOGY, compiler_options=options).seconds > 0
