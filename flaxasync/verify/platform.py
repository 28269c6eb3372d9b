"""Known defects of the platform: small programs that gave wrong results on a TPU, or would, by
public reports.

Each is a case of the op "platform". A program is what its report has, with the smallest changes:
the operand is random, and no compiler option is set. Some are not jitted here, because the defect
shows only without.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.call import available, vmem_limit

HBM = pl.BlockSpec(memory_space=pltpu.HBM)


@dataclasses.dataclass(frozen=True)
class Defect:
    """A defect that was reported."""

    report: str  # its address
    symptom: str
    workaround: str
    shape: tuple[int, ...]  # of the operand of the program, float32
    program: Callable[[jax.Array], jax.Array]  # what gives a wrong result, on one device
    reference: Callable[[jax.Array], jax.Array]  # what it should compute
    fails: bool = False  # whether the defect can also be that the program does not compile or end

    def __str__(self) -> str:
        return f"{self.symptom} ({self.report}): {self.workaround}"


def through_all_vector_memory(x: jax.Array) -> jax.Array:
    """Returns x [8, 128] as the difference of both ends of the largest buffer that kernels of this
    package ask for.
    """
    size = available()  # of the mesh in which this is called

    def kernel(x_ref: jax.Array, y_ref: jax.Array, buffer_ref: jax.Array) -> None:
        first = pl.ds(0, x.shape[0])
        last = pl.ds(buffer_ref.shape[0] - x.shape[0], x.shape[0])
        buffer_ref[first, :] = x_ref[...]
        buffer_ref[last, :] = 2 * buffer_ref[first, :]
        y_ref[...] = buffer_ref[last, :] - buffer_ref[first, :]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((size // (x.shape[1] * x.dtype.itemsize), x.shape[1]), x.dtype)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit(size)),
        name="through_all_vector_memory",
    )(x)


@jax.jit
def copy_beside_an_unused_operand(x: jax.Array) -> jax.Array:
    """Copies the first row of x [2, 256] through VMEM, in a kernel that is also given an array that
    it never reads.
    """
    row = (1, x.shape[1])

    def kernel(
        x_ref: jax.Array, unused_ref: jax.Array, y_ref: jax.Array, staging_ref: jax.Array
    ) -> None:
        pltpu.sync_copy(x_ref.at[pl.ds(0, 1), :], staging_ref)
        pltpu.sync_copy(staging_ref, y_ref)

    return pl.pallas_call(
        kernel,
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct(row, x.dtype),
        in_specs=[HBM, HBM],
        out_specs=HBM,
        scratch_shapes=[pltpu.VMEM(row, x.dtype)],
        name="copy_beside_an_unused_operand",
    )(x, jnp.ones((16, 128), x.dtype))  # the defect needs an array that this program makes


@jax.jit
def copy_of_four_bytes(x: jax.Array) -> jax.Array:
    """Copies x [1] through VMEM. The report has a `core_map` on Refs; this is a `pallas_call`."""

    def kernel(x_ref: jax.Array, y_ref: jax.Array, staging_ref: jax.Array) -> None:
        pltpu.sync_copy(x_ref, staging_ref)
        pltpu.sync_copy(staging_ref, y_ref)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype)],
        name="copy_of_four_bytes",
    )(x)


def gradient_of_gather(dy: jax.Array) -> jax.Array:
    """Returns the gradient of x[:, (0, 1, ...), :], which is dy. It is right under `jax.jit`."""
    rows = jnp.arange(dy.shape[1])
    return jax.vjp(lambda x: x[:, rows, :], jnp.zeros_like(dy))[1](dy)[0]


_ISSUES = "https://github.com/jax-ml/jax/issues"
DEFECTS = {
    "vmem": Defect(
        "https://considerthebulldog.com/pallas-sharded-matmuls",
        "a kernel cannot use the vector memory that the chip table gives it",
        "name tiles that need less, and backend='xla' or 'none' for the ops whose kernels fail",
        (8, 128),
        through_all_vector_memory,
        lambda x: x,
        fails=True,
    ),
    "unused": Defect(
        f"{_ISSUES}/39744",
        "a DMA from HBM in a kernel that has an unused operand gives zeros",
        "give kernels no operand that they do not read, and pass each operand in HBM through "
        "pltpu.with_memory_space_constraint(x, pltpu.HBM)",
        (2, 256),
        copy_beside_an_unused_operand,
        lambda x: x[:1],
    ),
    "bytes4": Defect(
        f"{_ISSUES}/39505",
        "a DMA of 4 bytes between HBM and VMEM gives zero",
        "pad what a DMA moves to a whole tile, or keep scalars in SMEM",
        (1,),
        copy_of_four_bytes,
        lambda x: x,
    ),
    "gather": Defect(
        f"{_ISSUES}/39025",
        "the gradient of a gather outside jax.jit has rows of zeros",
        "take gradients of array indexing inside jax.jit",
        (256, 8, 128),
        gradient_of_gather,
        lambda dy: dy,
    ),
}
"""The defects by their names, which are the backends of their cases."""
