"""The fused kernels at full size: the program that each compiles to, and tiles that do not fit are
refused.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.all_gather_matmul import SHAPES, program
from flaxasync.kernels.all_gather_matmul import all_gather_matmul
from flaxasync.kernels.collectives import all_gather, all_reduce
from flaxasync.kernels.engine.beside import WeightGradient
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.gemm import gemm
from flaxasync.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from flaxasync.kernels.weight_gradient import gather_weight_gradient
from tests.kernels.conftest import arranged, simulated

BY_ROWS, BY_COLUMNS = P(None, "ring"), P(None, None, "ring")
# Rows of a sequence of 2048 in batches of 8, features of a model of 8192, hidden ones of 28672 over
# the ring.
FULL_SIZE = {
    "reduce_scatter": (
        lambda x, w: matmul_reduce_scatter((x,), (w,), "ring")[0],
        (BY_COLUMNS, P("ring")),
        BY_ROWS,
        ((8, 2048, 28672), (28672, 8192)),
    ),
    "weight_gradient": (
        lambda x, dy: gather_weight_gradient(x, (dy,), "ring"),
        (BY_ROWS, BY_COLUMNS),
        (P(None, "ring"),),
        ((8, 2048, 8192), (8, 2048, 28672)),
    ),
}


def at_full_size(name, topology):
    """Returns a jitted function and its arguments."""
    if name.startswith("gather"):
        return program("fused", topology, SHAPES[int(name[-1])])
    local, specs, out_specs, shapes = FULL_SIZE[name]
    mesh = fa.check.topology_mesh(topology, (fa.check.topology_size(topology),), ("ring",))
    fn = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs))
    return fn, *arranged(mesh, shapes, specs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("gather 0", "tpu7x:2x2x1"),  # x stays
        ("gather 3", "v5p:2x2x2"),  # x streams
        ("gather 6", "v5e:2x4"),  # also with w transposed
        ("reduce_scatter", "v5e:2x4"),
        ("weight_gradient", "v6e:2x4"),
        ("weight_gradient", "tpu7x:2x2x1"),
    ],
)
def test_the_program_is_the_kernel_alone(name, topology):
    """XLA adds a copy where a kernel that communicates ends a program. The weight gradient has x
    transposed before.
    """
    fn, *arguments = at_full_size(name, topology)
    entry = fa.check.parse(fa.check.compile_for(topology, fn, *arguments).as_text()).entry
    opcodes = collections.Counter(instruction.opcode for instruction in entry.instructions)
    assert opcodes["custom-call"] == 1
    assert not {"fusion", "transpose", "slice", "concatenate", "pad"} & set(opcodes)
    if name == "weight_gradient":
        # A tpu7x transposes on its SparseCore: the text has the short form of an asynchronous call.
        assert opcodes["copy"] + opcodes["custom-call-start"] + opcodes["async-start"] == 2


@pytest.mark.slow
def test_the_most_tiles_leave_semaphores_for_what_is_computed_beside():
    """192 tiles of a block, and w stays in vector memory: libtpu refused 196, for which it lacked
    two semaphores.
    """
    mesh = fa.check.topology_mesh("v5e:2x4", (8,), ("ring",))

    def both(x, w, of_rows, of_columns, local, of_local):
        beside = WeightGradient(local, local, (of_local, of_local))
        options = {
            "scales": (of_rows, of_columns),
            "result": jnp.bfloat16,
            "tiles": Tiles(128, 1024, 128),
        }
        return matmul_reduce_scatter((x,), (w,), "ring", gradients=[beside], **options)

    fn = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    shapes = [
        (1, 8 * 16 * 128, 1024),
        (1024, 12 * 128),
        (1, 8 * 16 * 128),
        (12 * 128,),
        (4096, 1024),
        (1024,),
    ]
    dtypes = [jnp.int8, jnp.int8, jnp.float32, jnp.float32, jnp.int8, jnp.float32]
    arguments = arranged(mesh, shapes, [P()] * len(shapes))
    arguments = [
        argument.update(dtype=dtype) for argument, dtype in zip(arguments, dtypes, strict=True)
    ]
    program = fa.check.compile_for("v5e:2x4", fn, *arguments)
    assert program.as_text().count("tpu_custom_call") == 1


TOO_LARGE = Tiles(8192, 8192, 8192)
TAKES = (
    r"take \d{3,4}\.\d MiB with all buffers, and a v5e has 120 MiB to give; the largest of "
    r"this form are m="
)


@pytest.mark.parametrize(
    ("error", "message", "call", "shapes"),
    [
        (ValueError, TAKES, functools.partial(gemm, tiles=TOO_LARGE), [(8192, 8192), (8192, 8192)]),
        (
            ValueError,
            TAKES,
            lambda x, w: all_gather_matmul(x, (w,), "ring", tiles=TOO_LARGE),
            [(8, 4096, 8192), (8192, 8192)],
        ),
        (
            ValueError,
            TAKES,
            lambda x, w: matmul_reduce_scatter((x,), (w,), "ring", tiles=TOO_LARGE),
            [(1, 16384, 4096), (4096, 8192)],
        ),
        (
            ValueError,
            TAKES,
            lambda x, dy: gather_weight_gradient(x, (dy,), "ring", tiles=TOO_LARGE),
            [(1, 4096, 4096), (1, 8192, 8192)],
        ),
        (
            ValueError,
            TAKES,
            functools.partial(all_reduce, axis_name="ring", tiles=TOO_LARGE),
            [(8192, 8192)],
        ),
        (
            NotImplementedError,
            "a TPU has 384 for them: 8192 rows and n=4096 .* are 1024 tiles",
            lambda x, w: matmul_reduce_scatter((x,), (w,), "ring", tiles=Tiles(256, 128, 128)),
            [(1, 16384, 128), (128, 4096)],
        ),
        (
            ValueError,
            "half of the rows of x each way: got 24, needed a multiple of 16; use directions=1",
            functools.partial(all_gather, axis_name="ring", directions=2),
            [(24, 128)],
        ),
        (
            ValueError,
            "half of the columns of a tile each way: got 128, needed a multiple of 256; use "
            "directions=1",
            functools.partial(all_reduce, axis_name="ring", directions=2),
            [(32, 128)],
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_sizes(error, message, call, shapes):
    with simulated((2,), ("ring",)):  # each device has float32 operands of these shapes
        fn = jax.shard_map(call, in_specs=P(), out_specs=P("ring"), check_vma=False)
        operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        with pytest.raises(error, match=message):
            jax.eval_shape(fn, *operands)
