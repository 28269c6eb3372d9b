"""The call of a kernel whose operands and results stay in HBM, with its cost for XLA's scheduler."""

from collections.abc import Callable, Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.refs import HBM, ScratchShapes
from flaxasync.kernels.engine.vmem import vmem_limit


def call(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[ScratchShapes],
    collective_id: int | None,
    vmem_bytes: int | None,  # the bytes of all buffers, or None where there are none
    flops: int,
    hbm_bytes: int,
    sent: int,  # bytes that leave for other devices
) -> Sequence[jax.Array]:
    """Calls a kernel body with Refs of the operands, of the results and of scratch memory; returns the results."""
    return pl.pallas_call(
        body,
        out_shape=list(results),
        in_specs=[HBM] * len(operands),
        out_specs=[HBM] * len(results),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id, vmem_limit_bytes=None if vmem_bytes is None else vmem_limit(vmem_bytes)
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=hbm_bytes, remote_bytes_transferred=sent
        ),
        name=name,
    )(*operands)
