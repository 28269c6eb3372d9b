"""The backends of the ops: their names, which op has which, and how a call gets its backend.

```
none       one collective operation, then the product, or the reverse              every device
xla        a ring of `lax.ppermute` steps; one block is multiplied while the       every device
           next one travels
pallas     the same ring on Pallas DMAs, as start/done pairs on values             TPU
stateful   the same ring on Pallas DMAs, as start/done pairs on Refs               TPU
fused      one Pallas kernel that sends and multiplies                             TPU
exchange   the product, then a Pallas kernel in which all devices send to all      TPU
           others; for few rows
```

A call that names a backend gets that backend or an error; it is never given another one silently. A call that names
none gets what `flaxasync.plan` predicts to be fastest on the chips of the mesh, of what was verified there
(`flaxasync.ops.trust`), or the default of the op where the mesh is of devices that have no data sheet here, such as
CPUs.

To add a backend to an op, add its name to the op's entry in `OPS` and give `plan` its cost. To add an op, add an entry.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from flaxasync import hardware, mesh
from flaxasync.mesh import UnsupportedError
from flaxasync.ops import trust
from flaxasync.ops.costs.cost import Shape
from flaxasync.ops.plan import plan
from flaxasync.ring import Ring
from flaxasync.transport import TRANSPORTS

BACKENDS = ("none", "xla", "pallas", "stateful", "fused", "exchange")
ON_EVERY_DEVICE = ("none", "xla")
MATMULS = ("none", "xla", "pallas", "stateful", "fused")
RINGS = ("none", "xla", "pallas", "stateful")  # what an op has that stands on `ring_gather` and `ring_reduce` alone


@dataclasses.dataclass(frozen=True)
class Support:
    """Which backends an op has.

    Attributes:
      backends: The names that a call may give.
      default: What a call gets that names no backend on devices without a data sheet. It runs on every device.
      kernel: The backend that stands for the op's Pallas matmul kernels: `plan` considers them where this one can serve
        the call. None for an op without such kernels.
      aliases: Names that older callers use, each with the backend that it means.
    """

    backends: tuple[str, ...]
    default: str = "xla"
    kernel: str | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


OPS: dict[str, Support] = {
    "all_gather_matmul": Support(MATMULS, kernel="fused"),
    "matmul_reduce_scatter": Support(MATMULS, kernel="fused"),
    "matmul_all_reduce": Support(BACKENDS, kernel="fused"),
    # The variants of the published study that this op follows: its "fused" hides the gather alone.
    "mesh_matmul": Support(("none", "xla_gemm", "serial", "fused", "overlapped"), default="none", kernel="overlapped"),
    "ring_attention": Support(RINGS, aliases={"gather": "none"}),
    "lookup_reduce_scatter": Support(RINGS),
}


def choose(
    op: str,
    requested: str | None,
    *,
    shapes: Sequence[Shape] = (),
    ring: int | tuple[int, int] = 1,
    check: Callable[[str], None] = lambda backend: None,
    **options: Any,
) -> str:
    """Returns the name of the backend that a call of `op` uses.

    Args:
      op: The name of the op, which begins every error message.
      requested: What the caller asked for; None to choose.
      shapes: The shapes of the operands, as `flaxasync.plan` takes them.
      ring: The number of devices, as `flaxasync.plan` takes it.
      check: Raises NotImplementedError or ValueError if a backend of the op cannot serve this call on TPUs; see
        `cannot_serve`.
      **options: Further options of `flaxasync.plan`.

    Raises:
      ValueError: There is no backend of this name.
      NotImplementedError: The op lacks this backend, or the backend cannot serve this call.
    """
    support = OPS[op]
    if requested is None:
        return _planned(op, shapes, ring, check, options)
    name = support.aliases.get(requested, requested)
    if name not in support.backends:
        if name not in BACKENDS:
            raise ValueError(
                f"{op} got backend={requested!r}: it must be one of {', '.join(support.backends)}, or None to choose"
            )
        raise UnsupportedError(
            f"{op} has no {requested!r} backend: it has {', '.join(support.backends)}; use "
            f"backend={support.default!r}, which runs on every device"
        )
    if name not in ON_EVERY_DEVICE:
        mesh.check_tpu(f"{op} with backend={name!r}", f"backend={support.default!r}, which runs on every device")
    check(name)
    return name


def if_available(op: str, requested: str | None) -> str | None:
    """Returns `requested` if `op` has this backend, and None, which lets the op choose, if only other ops have it.

    This is for layers: their `backend` is meant for all of their ops, and not every op has every backend.
    """
    name = OPS[op].aliases.get(requested, requested) if requested is not None else None
    return None if name in BACKENDS and name not in OPS[op].backends else requested


def cannot_serve(op: str, backend: str, limit: str, instead: str) -> UnsupportedError:
    """Returns the error for a backend that cannot serve a call.

    Args:
      op: The name of the op.
      backend: The backend that was named.
      limit: What the backend takes and what it got, beginning with a verb: "has kernels for float32: got float16".
      instead: What to do: "cast the operands, or use backend='xla'".
    """
    return UnsupportedError(f"{op} with backend={backend!r} {limit}; {instead}")


def make_ring(
    backend: str, axis_name: str, size: int, *, directions: Literal[1, 2] | None = None, unroll: int = 2
) -> Ring:
    """Returns the ring of `size` devices on which a backend other than "fused" and "exchange" moves its blocks.

    By default blocks go in both directions on rings of three or more TPUs, whose links carry both at once.
    """
    if directions is None:
        directions = 2 if size > 2 and mesh.platform() == "tpu" else 1
    return Ring(axis_name, None if backend == "none" else TRANSPORTS[backend], directions, unroll)


def _planned(
    op: str, shapes: Sequence[Shape], ring: int | tuple[int, int], check: Callable[[str], None], options: dict[str, Any]
) -> str:
    """Returns what `plan` chooses for the chips of the mesh, and the op's default where it knows none or no shapes."""
    support, chip = OPS[op], mesh.chip()
    if chip is None and mesh.platform() == "tpu":
        trust.say_once(hardware.describe_unknown(mesh.chip_name()))
    if chip is None or not shapes or any(0 in shape for shape in shapes):
        return support.default
    considered = {"kernels": support.kernel} if support.kernel is not None else {}
    if "exchange" in support.backends:
        considered["exchange"] = "exchange"
    for option, backend in considered.items():
        try:
            check(backend)
            options[option] = True
        except (NotImplementedError, ValueError):
            options[option] = False
    found = plan(op, *shapes, chip=chip, ring=ring, **options)
    if trust.is_assumed() or found.trusted == found.backend:
        return found.backend
    faster = found.seconds[found.trusted] / found.seconds[found.backend]
    trust.announce(op, found.backend, found.trusted, chip.name, ring, faster=faster)
    return found.trusted
