"""The cases that are verified: every op with every backend, on shapes of one device."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, get_args

import jax.numpy as jnp

from flaxasync.hardware import CHIPS
from flaxasync.kernels.flash_attention import unsupported as flash_lacks
from flaxasync.ops import choose, trust
from flaxasync.ops.quantization import Kind, Quantization
from flaxasync.ops.roofline import Shape

AXIS = "model"
MESH_AXES = ("x", "y")
BACKENDS: dict[str, tuple[str, ...]] = {
    **{op: support.backends for op, support in choose.OPS.items()},
    "ppermute": ("xla", "pallas"),
    "all_gather": ("xla", "pallas"),
    "all_to_all": ("xla", "pallas"),
    "prefetch": ("xla", "pallas"),
    "attention": ("reference", "flash"),
    "expert_products": ("reference", "grouped"),
}
"""The backends of everything that is verified, in the order of the cases.

Those of `attention`, and of `expert_products` for `expert_mlp`, are what the argument `kernel`
names, and those of `prefetch` what moves the weights and gradients of `scan_with_prefetch`.
"""
PLAIN = {
    "ppermute": "xla",
    "all_gather": "xla",
    "all_to_all": "xla",
    "prefetch": "xla",
    "attention": "reference",
    "expert_products": "reference",
}
"""The backend that is plain XLA and serves as the reference of times; "none" for ops that are not
listed here.
"""
PAIRS = ("pallas", "stateful")
"""Backends whose transfers begin in one kernel and end in another, which JAX's simulator of kernels
cannot do.
"""
FORGETS = "JAX's simulator forgets transfers that outlive a kernel"
MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
# the backends of MATMULS that are verified in 8 bits, too: others only send the values
IN_8_BITS = ("none", "fused")
SIZES = {  # rows of products, features, head size and heads
    "cpu": (32, 64, 16, 4),
    "simulated": (16, 256, 64, 2),
    "rehearsed": (128, 512, 128, 4),
    "quick": (512, 1024, 128, 8),
    "full": (1024, 4096, 128, 16),
}
SMALL = ("cpu", "simulated")  # sizes of CPU devices
FORWARD_ONLY = ("all_gather", "all_to_all", "prefetch")
type Facts = dict[str, Any]  # of a machine or an outcome, as JSON has them
KEPT_BYTES = 2**40  # what a case may keep that keeps the gathered x: all of it


@dataclasses.dataclass(frozen=True)
class Case:
    """One op with one backend."""

    op: str
    backend: str
    # the sizes of the mesh axes: of `AXIS`, or of `MESH_AXES` for mesh_matmul
    mesh: tuple[int, ...]
    shapes: tuple[Shape, ...]  # of the operands on one device, as `flaxasync.plan` takes them
    dtype: str = "bfloat16"
    directions: int | None = None  # of the ring; None lets the op choose
    gradient: bool = True  # whether the gradients are verified and timed, too
    # "int8" or "fp8": the type in which all products are multiplied
    quantization: Kind | None = None
    keeps: bool = False  # whether all_gather_matmul may keep the gathered x for its weight gradient
    # whether the kernels run in JAX's simulator of TPU kernels, on CPU devices
    simulate: bool = False

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    @property
    def ring(self) -> int | tuple[int, int]:
        """The number of devices, or those on both axes, as `flaxasync.plan` takes them."""
        if self.op != "mesh_matmul":
            return self.devices
        x, y = self.mesh
        return x, y

    @property
    def plain(self) -> bool:
        """Whether this is the backend that the others of the op are compared with."""
        return self.backend == PLAIN.get(self.op, "none")

    @property
    def takes_flash(self) -> bool:
        """Whether this is ring attention that multiplies its blocks with the kernel "flash" on
        TPUs.

        Without a direction, ring attention takes one that the kernel can serve.
        """
        if self.op != "ring_attention":
            return False
        _, rows, _, head = self.shapes[0]
        return (
            flash_lacks(jnp.dtype(self.dtype), head, rows, rows // (self.directions or 1)) is None
        )

    @property
    def is_pair(self) -> bool:
        """Whether transfers begin in one kernel and end in another."""
        return self.backend in (*PAIRS, "exchange")

    @property
    def options(self) -> dict[str, int | bool | Quantization]:
        """Further options of the op and of `flaxasync.plan`: those of 8 bits, and to keep the
        gathered x.
        """
        options: dict[str, int | bool | Quantization] = {}
        kind = self.quantization
        if self.keeps:
            options["gathered_bytes"] = KEPT_BYTES
        if kind is not None:
            options["quantization"] = Quantization(kind, backward=kind, weights=kind)
        return options

    @property
    def text(self) -> str:
        """The case as JSON, under which its verdict is stored."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def label(self) -> str:
        ways = {None: "", 1: "1 direction", 2: "2 directions"}[self.directions]
        parts = [f"{self.op:22} {self.backend:10} {ways:12}"]
        if self.quantization is not None:
            parts.append(self.quantization)
        if self.keeps:
            parts.append("may keep")
        if not self.gradient:
            parts.append("forward")
        return " ".join(parts).rstrip()


def list_cases(
    platform: str,
    devices: int,
    *,
    chip: str | None = None,
    quick: bool,
    only: Sequence[str] = (),
    rehearse: bool = False,
) -> list[Case]:
    """Returns the cases for so many devices of a "tpu", "gpu" or "cpu".

    A `chip` of the table has cases in 8 bits of the types for which it has a rate, others of all
    types. Quick cases have small shapes, and smaller ones in a rehearsal; the shapes of CPUs are
    small in any case. Quick cases verify gradients together with results only. `only` names ops,
    such as "all_gather_matmul", or "attention/flash" with a backend; all by default. The plain
    backend of each op is always among the cases, because a backend may be slower than it. An
    unknown name raises ValueError.
    """
    chosen: set[tuple[str, str]] = set()
    for name in only:
        op, _, backend = name.partition("/")
        if op not in BACKENDS or (backend and backend not in BACKENDS[op]):
            known = "; ".join(f"{op}: {', '.join(names)}" for op, names in BACKENDS.items())
            raise ValueError(f"--ops got {name!r}: it must be OP or OP/BACKEND of {known}")
        named: tuple[str, ...] = (backend, PLAIN.get(op, "none"))
        if not backend:
            named = BACKENDS[op]
        chosen |= {(op, some) for some in named}
    on_devices = "full"
    if platform == "cpu":
        on_devices = "cpu"
    elif quick and rehearse:
        on_devices = "rehearsed"
    elif quick:
        on_devices = "quick"
    rates = CHIPS.get(chip or "")
    types = [kind for kind in get_args(Kind) if rates is None or rates.rate(kind)]
    cases = []
    for op, names in BACKENDS.items():
        for backend in names:
            if only and (op, backend) not in chosen:
                continue
            size = on_devices
            if platform != "tpu" and backend not in trust.PLAIN:
                size = "simulated"
            case = _case(op, backend, devices, size)
            cases += _variants(case, quick)
            if backend in IN_8_BITS and op in MATMULS and (not only or (op, "fused") in chosen):
                for kind in types:
                    cases += _variants(dataclasses.replace(case, quantization=kind), quick)
    return cases


def stand_in(case: Case) -> Case:
    """Returns the case whose values stand for those of a TPU case in a rehearsal.

    It is the same op, backend and directions with small shapes on up to four CPU devices, where
    kernels are simulated.
    """
    devices = min(case.devices, 4)
    size = "simulated"
    if case.backend in trust.PLAIN:
        size = "cpu"
    small = _case(case.op, case.backend, devices, size, pairs=False)
    directions = None
    if devices > 2:
        directions = case.directions
    alike = {name: getattr(case, name) for name in ("gradient", "quantization", "keeps")}
    return dataclasses.replace(small, directions=directions, **alike)


def unsupported(case: Case, platform: str, *, quick: bool) -> str | None:
    """Returns why a case cannot run on a machine, or None if it can."""
    if case.devices == 1 and case.op not in (
        "attention",
        "expert_products",
        "mesh_matmul",
        *MATMULS,
    ):
        return "needs several devices"
    if not case.simulate:
        return None
    if case.is_pair:
        return f"needs TPUs: {FORGETS}"
    if platform != "cpu" or not quick:
        return "needs TPUs; on CPU devices --quick runs it in a simulator"
    if case.devices == 1:
        return "needs several devices"
    return None


def _case(op: str, backend: str, devices: int, size: str, *, pairs: bool = True) -> Case:
    """Returns a case of a size; a ring that is simulated is a pair, unless `pairs` is False."""
    simulate = size == "simulated"
    dtype = "bfloat16"
    if size in SMALL:
        dtype = "float32"
    mesh: tuple[int, ...] = (devices,)
    if op == "mesh_matmul":
        mesh = _squarest(devices)
        if simulate:
            mesh = _squarest(min(devices, 4))
    elif simulate and pairs:
        mesh = (min(devices, 2),)
    return Case(op, backend, mesh, _shapes(op, size, mesh), dtype, simulate=simulate)


def _squarest(devices: int) -> tuple[int, int]:
    """Returns the sides of a mesh that differ least, the smaller one first."""
    x = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    return x, devices // x


def _variants(case: Case, quick: bool) -> list[Case]:
    """Returns a case in each direction, with and without gradients."""
    is_ring = case.op in (*MATMULS, "ring_attention", "expert_mlp") and case.backend not in (
        "none",
        "exchange",
    )
    ways: tuple[int | None, ...] = (None,)
    if is_ring and case.devices > 2:
        ways = (1, 2)
    gradients: tuple[bool, ...] = (False, True)
    if case.op in FORWARD_ONLY:
        gradients = (False,)
    elif quick:
        gradients = (True,)
    found = [
        dataclasses.replace(case, directions=way, gradient=g) for way in ways for g in gradients
    ]
    if case.op == "all_gather_matmul" and case.backend == "fused" and case.quantization is not None:
        # Where the plan keeps x, its products in 8 bits are those of another kernel than where x
        # travels again.
        found += [dataclasses.replace(c, keeps=True) for c in found if c.gradient]
    return found


def _shapes(op: str, size: str, mesh: tuple[int, ...]) -> tuple[Shape, ...]:
    """Returns the shapes on one device; every size is a multiple of what the kernels of the op
    need.
    """
    rows, wide, head, heads = SIZES[size]
    ring = math.prod(mesh)
    small = size in SMALL
    batch = 2
    sequence = rows
    if size == "simulated":
        batch = 1
        sequence = 256
    if op == "mesh_matmul":
        x, y = mesh
        k = wide * x * y // 2
        if small:
            k = 128 * x * y
        return (max(rows, 32) * y, k // y), (k // x, wide)
    attention = (batch, sequence, heads, head), (batch, sequence, heads // 2, head)
    gathered: tuple[Shape, ...] = (batch, ring * rows, wide), (wide, wide)
    experts: tuple[Shape, ...] = ((rows, wide), *((rows, 2),) * 2, *((2, wide, wide),) * 3)
    by_op: dict[str, tuple[Shape, ...]] = {
        "expert_mlp": experts,
        "expert_products": experts,
        "all_gather_matmul": ((batch, rows, wide), (wide, wide)),
        "matmul_reduce_scatter": gathered,
        "matmul_all_reduce": gathered,
        "ring_attention": attention,
        "attention": attention,
        "lookup_reduce_scatter": ((batch, ring * rows), (wide, wide)),
        "all_to_all": ((ring * rows, wide),),
    }
    return by_op.get(op, ((rows, wide),))
