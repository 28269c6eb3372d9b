"""How a call of an op is executed: decided here, once. What is below receives the `Execution` and
decides nothing.

docs/plan.md has a table of the backends, and of what a call without a backend takes.

A call that names a backend gets that backend or an error. A call that names none gets the fastest
backend of those that are trusted on the chips of the mesh (`flaxasync.ops.plan`,
`flaxasync.ops.trust`). On devices without a data sheet, such as CPUs, it gets the default of the
op.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax

from flaxasync import hardware, mesh
from flaxasync.hardware import Gpu
from flaxasync.mesh import UnsupportedError
from flaxasync.ops import trust
from flaxasync.ops.plan import Plan, plan, unknown_on_gpus
from flaxasync.ops.quantization import Quantization
from flaxasync.ops.roofline import Shape
from flaxasync.ring import Ring
from flaxasync.transport import TRANSPORTS

type Directions = Literal[1, 2] | None

ON_EVERY_DEVICE = ("none", "xla", "exchange")  # others run on TPUs alone
# what an op has that stands on `ring_gather` and `ring_reduce` alone
RINGS = ("none", "xla", "pallas", "stateful")
MATMULS = (*RINGS, "fused")
BACKENDS = (*MATMULS, "exchange")


@dataclasses.dataclass(frozen=True)
class Support:
    """Which backends an op has."""

    backends: tuple[str, ...]  # the names that a call may give
    # what a call gets that names none on devices without a data sheet; it runs on every device
    default: str = "xla"
    on_gpus: str | None = None  # the default on GPUs, if it is another
    kernel: str | None = None  # the backend whose limits say whether the planned kernels can serve


OPS: dict[str, Support] = {
    "all_gather_matmul": Support(MATMULS, kernel="fused"),
    "matmul_reduce_scatter": Support(MATMULS, kernel="fused"),
    "matmul_all_reduce": Support(MATMULS, kernel="fused"),
    # The variants of the published study that this op follows: its "fused" hides the gather alone.
    "mesh_matmul": Support(
        ("none", "xla_gemm", "serial", "fused", "overlapped"), default="none", kernel="overlapped"
    ),
    # CPU devices share their cores: nothing is hidden by a ring.
    "expert_mlp": Support((*RINGS, "exchange"), default="none"),
    "ring_attention": Support(RINGS),
    # Nothing is computed beside the transfers of a lookup.
    "lookup_reduce_scatter": Support(RINGS, on_gpus="none"),
}


@dataclasses.dataclass(frozen=True)
class Execution:
    """How one call of an op is executed. Hashable: it is a static argument of the VJP rules."""

    backend: str
    directions: Literal[1, 2] = 1  # 2 sends one half-block in each direction around the ring
    unroll: int = 2  # ring steps in one loop body
    # whether `all_gather_matmul` keeps the rows that it gathers for its weight gradient
    keep: bool = False

    def ring(self, axis_name: str) -> Ring:
        """Returns the ring on which a backend other than "fused" and "exchange" moves its
        blocks.
        """
        return Ring(axis_name, TRANSPORTS.get(self.backend), self.directions, self.unroll)


def decide(
    op: str,
    requested: str | None,
    *,
    ring: int | tuple[int, int],
    shapes: Sequence[Shape] = (),
    itemsize: int = 2,
    gathered_bytes: int = 0,
    directions: Directions = None,
    halves: bool = True,
    unroll: int = 2,
    check: Callable[[str], None] = lambda backend: None,
    quantization: Quantization | None = None,
    **options: Any,
) -> Execution:
    """Decides how a call of `op` is executed.

    Args:
      requested: The backend that the caller named; None to choose.
      ring, shapes, itemsize, gathered_bytes, quantization, **options: As `flaxasync.plan` takes
        them. Without shapes the op's default is chosen.
      directions: What the caller asked for. None stands for 2 on rings of three or more TPUs, whose
        links carry both directions at once.
      halves: Whether the op may halve blocks by itself, to send each half in one direction.
      check: Raises NotImplementedError if a backend of the op cannot serve this call on TPUs; see
        `cannot_serve`.

    Raises:
      ValueError: There is no backend of this name; directions or unroll are no such numbers.
      NotImplementedError: The op lacks this backend, or the backend cannot serve this call.
    """
    if directions not in (None, 1, 2):
        raise ValueError(f"{op} needs directions to be 1, 2 or None: got {directions!r}")
    if unroll < 1:
        raise ValueError(f"{op} needs unroll to be 1 or more: got {unroll}")
    if requested is not None:
        _check_named(op, requested, check)
    may_keep = _gathered_fits(ring, shapes, 1 if quantization else itemsize, gathered_bytes)
    found = None
    if requested is None or may_keep:  # a plan also says whether a named backend gains by keeping
        options["itemsize"] = itemsize
        if op == "all_gather_matmul":
            options["gathered_bytes"] = gathered_bytes
        if quantization is not None:
            options["quantization"] = quantization
        found = _plan(op, shapes, ring, check, options)
    backend = requested or _fastest(op, found, ring, quantization)
    if directions is None:
        if halves and ring not in (1, 2) and mesh.platform() == "tpu":
            directions = 2
        else:
            directions = 1
    return Execution(backend, directions, unroll, may_keep and _keeps(found, backend))


def if_available(op: str, requested: str | None) -> str | None:
    """Returns `requested` if `op` has this backend, and None, which lets the op choose, if only
    other ops have it.

    This is for layers: their `backend` is meant for all of their ops, and not every op has every
    backend.
    """
    if requested in BACKENDS and requested not in OPS[op].backends:
        return None
    return requested


def check_backend(op: str, requested: str | None) -> None:
    """Raises as `decide` does for a backend that `op` lacks, or that the devices of the mesh lack.

    This is for layers whose input is such that nothing travels, and the op is not called. The layer
    may have ops that have other backends, so one of these is no error.
    """
    named = if_available(op, requested)
    if named is not None:
        _check_named(op, named, lambda backend: None)


def check_mapped(op: str, operand: jax.Array) -> None:
    """Raises ValueError if `shard_map` leaves to XLA an axis that shards an operand."""
    spec = jax.typeof(operand).sharding.spec
    if any(entry is not None for entry in spec):
        raise ValueError(
            f"{op} needs every axis that shards its operands to be mapped by shard_map: got an "
            f"operand that is still sharded {spec}; leave axis_names out of jax.shard_map, or add "
            "them"
        )


def check_kernel(caller: str, instead: str) -> None:
    """Raises UnsupportedError where the mesh is of other devices than TPUs, or `shard_map` leaves
    an axis to XLA.
    """
    mesh.check_tpu(caller, instead)
    if not mesh.all_axes_mapped():
        raise UnsupportedError(
            f"{caller} needs every mesh axis of more than one device to be mapped by shard_map: XLA "
            "cannot partition a Pallas kernel; leave axis_names out of jax.shard_map, or use "
            f"{instead}"
        )


def is_default(precision: lax.PrecisionLike) -> bool:
    """Says whether a precision is the default one, with which kernels multiply."""
    return precision in (None, lax.Precision.DEFAULT, "default")


def cannot_serve(op: str, backend: str, limit: str, instead: str) -> UnsupportedError:
    """Returns the error for a backend that cannot serve a call.

    `limit` begins with a verb, as in "has kernels for float32: got float16"; `instead` says what to
    do.
    """
    return UnsupportedError(f"{op} with backend={backend!r} {limit}; {instead}")


def _check_named(op: str, requested: str, check: Callable[[str], None]) -> None:
    """Raises as `decide` says unless the op has the backend that a caller named, and it can
    serve.
    """
    support = OPS[op]
    anywhere = f"backend={support.default!r}, which runs on every device"
    if requested not in support.backends:
        has = ", ".join(support.backends)
        if requested not in BACKENDS:
            raise ValueError(
                f"{op} got backend={requested!r}: it must be one of {has}, or None to choose"
            )
        raise UnsupportedError(f"{op} has no {requested!r} backend: it has {has}; use {anywhere}")
    if requested not in ON_EVERY_DEVICE:
        mesh.check_tpu(f"{op} with backend={requested!r}", anywhere)
    check(requested)


def _plan(
    op: str,
    shapes: Sequence[Shape],
    ring: int | tuple[int, int],
    check: Callable[[str], None],
    options: dict[str, Any],
) -> Plan | None:
    """Returns the plan for the chips of the mesh without kernels that `check` refuses; None if it
    knows no chip.
    """
    chip = mesh.chip() or mesh.gpu()
    if isinstance(chip, Gpu) and unknown_on_gpus(op, ring, options) is not None:
        return None
    if chip is None and mesh.platform() == "tpu":
        trust.say_once(hardware.describe_unknown(mesh.chip_name()))
    if chip is None or not shapes or any(0 in shape for shape in shapes):
        return None
    kernel = OPS[op].kernel
    if kernel is not None:
        try:
            check(kernel)
        except UnsupportedError:
            options = options | {"kernels": False}
    return plan(op, *shapes, chip=chip, ring=ring, **options)


def _gathered_fits(
    ring: int | tuple[int, int], shapes: Sequence[Shape], itemsize: int, most_bytes: int
) -> bool:
    """Says whether all_gather(x) of the first shape is not empty, and of at most so many bytes."""
    if not isinstance(ring, int) or ring == 1 or not shapes:
        return False
    return 0 < ring * math.prod(shapes[0]) * itemsize <= most_bytes


def _fastest(
    op: str, found: Plan | None, ring: int | tuple[int, int], quantization: Quantization | None
) -> str:
    """Returns the fastest backend of those that are trusted here; says once which one would be
    faster.
    """
    if found is None and mesh.platform() == "gpu":
        return OPS[op].on_gpus or OPS[op].default
    if found is None:
        return OPS[op].default
    if trust.is_assumed():
        return found.backend
    if found.backend in found.unverified:
        faster = found.seconds[found.trusted] / found.seconds[found.backend]
        kinds = quantization.kinds if quantization else ()
        trust.announce(
            op, found.backend, found.trusted, mesh.chip_name(), ring, kinds=kinds, faster=faster
        )
    return found.trusted


def _keeps(found: Plan | None, backend: str) -> bool:
    """Says whether a backend keeps what it gathers, where memory suffices: by the plan, and always
    without one.
    """
    if found is None:
        return True
    cost = found.costs.get("pallas" if backend == "stateful" else backend)
    # None: the kernels cannot serve the gradient, which may not be wanted
    return cost is not None and cost.kept > 0
