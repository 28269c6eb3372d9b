"""The vector memory that the chip table gives a kernel is what the compiler gives it."""

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from flaxasync import check, hardware
from flaxasync.kernels.engine.vector_memory import available, vmem_limit


def through_vector_memory(x, size):
    """Returns x [8, 128] as the difference of both ends of a buffer of `size` bytes."""

    def kernel(x_ref, y_ref, buffer_ref):
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
        name="through_vector_memory",
    )(x)


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
def test_the_compiler_gives_a_kernel_that_much_vector_memory_and_no_more(chip):
    def compile_kernel(size_of):
        mesh = check.topology_mesh(
            f"{chip}:1x1", (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
        )
        with jax.set_mesh(mesh):
            x = jax.ShapeDtypeStruct((8, 128), "float32", sharding=jax.NamedSharding(mesh, P()))
            check.compile_for(
                f"{chip}:1x1", jax.jit(lambda x: through_vector_memory(x, size_of())), x
            )

    compile_kernel(available)  # of the mesh in which it is called
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_kernel(lambda: hardware.CHIPS[chip].vmem_bytes + hardware.MIB)
