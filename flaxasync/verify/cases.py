"""The cases that are verified: every op with every backend, on shapes of one device."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from flaxasync.kernels.flash_attention import unsupported as flash_lacks
from flaxasync.ops import execution, trust
from flaxasync.ops.costs.cost import Shape
from flaxasync.ops.costs.few_rows import steps
from flaxasync.verify.platform import DEFECTS

AXIS = "model"
MESH_AXES = ("x", "y")
BACKENDS: dict[str, tuple[str, ...]] = {
    **{op: support.backends for op, support in execution.OPS.items()},
    "ppermute": ("xla", "pallas"),
    "all_gather": ("xla", "pallas"),
    "all_to_all": ("xla", "pallas"),
    "attention": ("reference", "flash"),
    "platform": tuple(DEFECTS),
}
"""The backends of everything that is verified. Those of `attention` are what its argument `kernel` names, and those of
`platform` are known defects."""
PLAIN = {"ppermute": "xla", "all_gather": "xla", "all_to_all": "xla", "attention": "reference"}
"""The backend that is plain XLA and serves as the reference of times; "none" for ops that are not listed here."""
PAIRS = ("pallas", "stateful")
"""Backends whose transfers begin in one kernel and end in another, which JAX's simulator of kernels cannot do."""
FORGETS = "JAX's simulator forgets transfers that outlive a kernel"


@dataclasses.dataclass(frozen=True)
class Case:
    """One op with one backend.

    Attributes:
      op: The name of the op.
      backend: The name of the backend.
      mesh: The sizes of the mesh axes, in order: of `AXIS`, or of `MESH_AXES` for mesh_matmul.
      shapes: The shapes of the operands on one device, as `flaxasync.plan` takes them.
      dtype: The dtype of the operands.
      directions: The directions of the ring; None lets the op choose.
      gradient: Whether the gradients are verified and timed, too.
      simulate: Whether the kernels run in JAX's simulator of TPU kernels, on CPU devices.
    """

    op: str
    backend: str
    mesh: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: str = "bfloat16"
    directions: int | None = None
    gradient: bool = True
    simulate: bool = False

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    @property
    def plain(self) -> bool:
        """Whether this is the backend that the others of the op are compared with."""
        return self.backend == PLAIN.get(self.op, "none")

    @property
    def takes_flash(self) -> bool:
        """Whether this is ring attention that multiplies its blocks with the kernel "flash" on TPUs.

        Without a direction, ring attention takes one that the kernel can serve.
        """
        if self.op != "ring_attention":
            return False
        _, rows, _, head = self.shapes[0]
        return flash_lacks(jnp.dtype(self.dtype), head, rows, rows // (self.directions or 1)) is None

    @property
    def label(self) -> str:
        ways = {None: "", 1: "1 direction", 2: "2 directions"}[self.directions]
        if self.op == "matmul_all_reduce" and self.shapes[0][0] == 1 and self.backend in ("none", "exchange"):
            ways = f"{self.shapes[0][1]} rows"
        return f"{self.op:22} {self.backend:10} {ways:13}{'' if self.gradient else 'forward'}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def list_cases(
    platform: str, devices: int, *, quick: bool, only: Sequence[str] = (), rehearse: bool = False
) -> list[Case]:
    """Returns the cases for the devices of a machine.

    Args:
      platform: "tpu", "gpu" or "cpu".
      devices: The number of devices.
      quick: Whether to verify small shapes, and gradients together with results only.
      only: The ops to verify, such as "all_gather_matmul" or "attention/flash" with a backend; all by default. The
        plain backend of each op is always among the cases, because a backend may be slower than it.
      rehearse: Whether the cases are compiled and simulated instead of run; quick ones are then smaller.

    Raises:
      ValueError: `only` names an op or a backend that does not exist.
    """
    for name in only:
        op, _, backend = name.partition("/")
        if op not in BACKENDS or (backend and backend not in BACKENDS[op]):
            known = "; ".join(f"{op}: {', '.join(names)}" for op, names in BACKENDS.items())
            raise ValueError(f"--ops got {name!r}: it must be OP or OP/BACKEND of {known}")
    cases = []
    for op, names in BACKENDS.items():
        for backend in names:
            chosen = op in only or f"{op}/{backend}" in only
            beside = backend == PLAIN.get(op, "none") and any(name.startswith(f"{op}/") for name in only)
            if only and not chosen and not beside:
                continue
            simulate = platform != "tpu" and backend not in trust.PLAIN
            if op == "platform":
                operand = DEFECTS[backend].shape
                cases.append(Case(op, backend, (1,), (operand,), "float32", gradient=False, simulate=simulate))
                continue
            ring = min(devices, 2) if simulate else devices
            size = "simulated" if simulate else "full" if not quick else "rehearsed" if rehearse else "quick"
            if platform == "cpu" and not simulate:
                size = "cpu"
            mesh = _near_square(min(devices, 4) if simulate else devices) if op == "mesh_matmul" else (ring,)
            case = Case(
                op,
                backend,
                mesh,
                _shapes(op, size, mesh),
                dtype="bfloat16" if platform != "cpu" else "float32",
                simulate=simulate,
            )
            ways: tuple[int | None, ...] = (None,)
            if ring > 2 and _is_ring(op, backend):
                ways = (1, 2)
            gradients = (False,) if op in ("all_gather", "all_to_all") else (True,) if quick else (False, True)
            these = [case]
            if backend == "exchange":  # in one step and in two, each beside XLA's sum of the same rows
                shapes = [_few_rows(case, count) for count in (1, 2)]
                names = (backend,) if simulate else (PLAIN.get(op, "none"), backend)
                these = [dataclasses.replace(case, backend=n, shapes=s) for s in shapes for n in names]
            cases += [dataclasses.replace(c, directions=w, gradient=g) for c in these for w in ways for g in gradients]
    return cases


def stand_in(case: Case) -> Case:
    """Returns the case whose values stand for those of a TPU case in a rehearsal.

    It is the same op, backend and directions with small shapes on up to four CPU devices, where kernels are simulated.
    The program of a known defect of the platform is small already.
    """
    simulate = case.backend not in trust.PLAIN
    if case.op == "platform":
        return dataclasses.replace(case, simulate=simulate)
    ring = min(case.devices, 4)
    mesh = _near_square(ring) if case.op == "mesh_matmul" else (ring,)
    shapes = _shapes(case.op, "simulated" if simulate else "cpu", mesh)
    ways = case.directions if ring > 2 else None
    small = dataclasses.replace(case, mesh=mesh, shapes=shapes, dtype="float32", directions=ways, simulate=simulate)
    if case.backend == "exchange":
        small = dataclasses.replace(small, shapes=_few_rows(small, 1 if case.shapes[0][1] == 1 else 2))
    return small


def unsupported(case: Case, platform: str, *, quick: bool) -> str | None:
    """Returns why a case cannot run on a machine, or None if it can."""
    if case.devices == 1 and case.op not in ("attention", "all_gather_matmul", "matmul_reduce_scatter",
                                             "matmul_all_reduce", "mesh_matmul", "platform"):  # fmt: skip
        return "needs several devices"
    if not case.simulate:
        return None
    if case.backend in PAIRS:
        return f"needs TPUs: {FORGETS}"
    if platform != "cpu" or not quick:
        return "needs TPUs; on CPU devices --quick runs it in a simulator"
    return "needs several devices" if case.devices == 1 and case.op != "platform" else None


def _is_ring(op: str, backend: str) -> bool:
    return backend not in ("none", "exchange") and op in (
        "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "ring_attention",
    )  # fmt: skip


def _near_square(devices: int) -> tuple[int, int]:
    """Returns the sides of the mesh (x, y) with x * y devices whose sides differ least, x the smaller one."""
    x = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    return x, devices // x


def _few_rows(case: Case, count: int) -> tuple[Shape, ...]:
    """Returns shapes of matmul_all_reduce whose sums are exchanged in `count` steps.

    In one step they are one row, of fewer columns on long rings; in two steps 8 rows, or more on short rings.
    """
    x, (k, n) = case.shapes
    rows, row_bytes = 1 if count == 1 else 8, jnp.dtype(case.dtype).itemsize
    while count == 1 and steps(case.devices, n * row_bytes) == 2 and n > 1:
        n //= 2
    while count == 2 and steps(case.devices, rows * n * row_bytes) == 1 and case.devices > 1:
        rows *= 2
    return (1, rows, x[2]), (k, n)


def _shapes(op: str, size: str, mesh: tuple[int, ...]) -> tuple[Shape, ...]:
    """Returns the shapes on one device; every size is a multiple of what the kernels of the op need."""
    rows, wide, head, heads = {
        "cpu": (32, 64, 16, 4),
        "simulated": (16, 256, 64, 2),
        "rehearsed": (128, 512, 128, 4),
        "quick": (512, 1024, 128, 8),
        "full": (1024, 4096, 128, 16),
    }[size]
    ring, batch = math.prod(mesh), 1 if size == "simulated" else 2
    sequence = 256 if size == "simulated" else rows
    if op == "all_gather_matmul":
        return (batch, rows, wide), (wide, wide)
    if op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        return (batch, ring * rows, wide), (wide, wide)
    if op == "mesh_matmul":
        x, y = mesh
        k = 128 * x * y if size in ("cpu", "simulated") else wide * x * y // 2
        return (32 * y if size in ("cpu", "simulated") else rows * y, k // y), (k // x, wide)
    if op in ("ring_attention", "attention"):
        return (batch, sequence, heads, head), (batch, sequence, heads // 2, head)
    if op == "lookup_reduce_scatter":
        return (batch, ring * rows), (wide, wide)
    if op == "all_to_all":
        return ((ring * rows, wide),)
    return ((rows, wide),)
