"""Operands and results of the fused kernels stay in HBM in the compiled program, where XLA would move small ones."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from flaxasync.kernels.engine import call

OPS = {
    "all_gather_matmul": (P("model", None), P(None, "model"), P(None, "model")),
    "matmul_reduce_scatter": (P(None, "model"), P("model", None), P("model", None)),
}


def spaces(op):
    """Returns the memory spaces of what a kernel reads and writes, where operations make and use small arrays."""
    x_spec, w_spec, y_spec = OPS[op]
    mesh = check.topology_mesh("v5e:2x2", (4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, w):
        return getattr(fa, op)(jnp.tanh(x), 2 * w, "model", backend="fused") + 1

    shapes = [
        jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        for spec in (x_spec, w_spec)
    ]
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=(x_spec, w_spec), out_specs=y_spec)
        program = check.compile_for("v5e:2x2", mapped, *shapes, compiler_options=check.HLO_ONLY)
    (computation, kernel) = next(
        (computation, i)
        for computation in check.parse(program.as_text()).computations.values()
        for i in computation.instructions
        if i.custom_call_target == "tpu_custom_call"
    )
    read = [computation.by_name[name].shape.memory_space for name in kernel.operands]
    written = [shape.memory_space for shape in kernel.shape.elements or (kernel.shape,)]
    return {*read, *written}


@pytest.mark.parametrize("op", OPS)
def test_operands_and_results_stay_in_hbm(op):
    assert spaces(op) == {0}


def test_block_specs_alone_do_not_keep_them_there(monkeypatch):
    """Negative test: without the constraints XLA moves them into vector memory, which is space 1."""
    monkeypatch.setattr(call.pltpu, "with_memory_space_constraint", lambda x, space: x)
    monkeypatch.setattr(call, "_in_hbm", lambda result: result)
    assert 1 in spaces("all_gather_matmul")
