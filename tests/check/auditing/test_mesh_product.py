"""The audit recognises a matmul that splits the contraction over two mesh axes, on any mesh, and
nothing else.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from flaxasync.check import HLO_ONLY, audit, compile_for, topology_mesh
from tests.check.hlo_texts import ADD, changed, module

BLOCK = "bf16[4096,4096]{1,0}"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"3000000"}}'
MESH_MATMUL = "flaxasync.nn.MeshLinear"


def product(arrival, sum_="replica_groups=[2,2]<=[4]"):
    """Returns a program of four devices: the second operand arrives, is multiplied, and the product
    is summed.
    """
    return module(
        f"%w = {BLOCK} {arrival}",
        f"%y = {BLOCK} dot(%operand0, %w), {DOT}, {CYCLES}",
        f"ROOT %sum = {BLOCK} all-reduce(%y), {sum_}, to_apply=%add",
        wrapped=ADD.replace("f32", "bf16"), inputs=(BLOCK, BLOCK), partitions=4,
    )  # fmt: skip


def advised(text):
    """Returns the instructions for which the audit advises `mesh_matmul`."""
    return {
        finding.instruction
        for finding in audit(text, chip="v5e").findings
        if MESH_MATMUL in finding.remedy
    }


TRANSPOSED = "collective-permute(%operand1), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}"
RING = "collective-permute(%operand1), source_target_pairs={{0,2},{1,3},{2,0},{3,1}}"


def test_a_permute_by_which_some_devices_keep_their_block():
    text = product(TRANSPOSED)
    assert advised(text) == {"w", "sum"}
    # the kernels multiply bfloat16 and float32
    assert advised(changed(text, ("bf16", "f16"))) == set()


@pytest.mark.parametrize(
    ("arrival", "sum_"),
    [
        # a hop of a ring, such as those of flaxasync.all_gather_matmul
        (RING, "replica_groups=[2,2]<=[4]"),
        (TRANSPOSED, "replica_groups=[1,4]<=[4]"),  # between devices that add up: no two axes
        # as FSDP does
        (
            "all-gather(%half), replica_groups={{0,2},{1,3}}, dimensions={0}",
            "replica_groups=[2,2]<=[4]",
        ),
    ],
)
def test_other_products_are_not_taken_for_one(arrival, sum_):
    text = product(arrival, sum_)
    if "%half" in text:
        halved = (
            f"  %w = {BLOCK}",
            f"  %half = bf16[2048,4096]{{1,0}} slice(%operand1)\n  %w = {BLOCK}",
        )
        text = changed(text, halved)
    assert advised(text) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "shape", "found"), [
    ("v6e:2x4", (4, 2), {"all-gather", "all-reduce"}),
    ("v5e:2x4", (2, 4), {"collective-permute", "all-reduce"}),
    ("v5e:4x4", (4, 4), {"collective-permute", "all-reduce"}),
])  # fmt: skip
def test_what_xla_makes_of_it_on_other_meshes(topology, shape, found):
    """test_audit.py has the study's 2x2. XLA gathers the rows where there are more mesh rows than
    mesh columns.
    """
    mesh = topology_mesh(topology, shape, ("x", "y"))
    lhs, rhs = array((16384, 16384), mesh, P("x", "y")), array((16384, 8192), mesh, P("x", None))
    fn = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None)))
    names = advised(compile_for(topology, fn, lhs, rhs, compiler_options=HLO_ONLY))
    assert {name.split(".")[0].removesuffix("-start") for name in names} == found
