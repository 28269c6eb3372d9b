"""The cases that are verified: every op with every backend, on shapes of one device."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, get_args

import jax.numpy as jnp

from flaxasync.kernels.flash_attention import unsupported as flash_lacks
from flaxasync.ops import choose, trust
from flaxasync.ops.quantization import Kind
from flaxasync.ops.roofline import Shape

BACKENDS: dict[str, tuple[str, ...]] = {
    **{op: support.backends for op, support in choose.OPS.items()},
    "ppermute": ("xla", "pallas"),
    "all_to_all": ("xla", "pallas"),
    "prefetch": ("xla", "pallas"),
    "attention": ("reference", "flash"),
    "expert_products": ("reference", "grouped"),
}
"""The backends of everything that is verified, in the order of the cases.

The first one of an op is plain XLA, beside which the others are timed. Those of `attention`, and
of `expert_products` for `expert_mlp`, are what the argument `kernel` names, and those of `prefetch`
what moves the weights and gradients of `scan_with_prefetch`.
"""
MOVES = ("ppermute", "all_to_all", "prefetch")
"""Ops that only move data, which mean nothing on one device."""
FORWARD_ONLY = ("all_to_all", "prefetch")
"""Ops that have no gradient, as layers have rules of their own; all others are verified with it."""
MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
RINGS = (*MATMULS, "ring_attention", "expert_mlp")
# the backends of MATMULS that are verified in 8 bits, too: others only send the values
IN_8_BITS = ("none", "fused")
PAIRS = ("pallas", "stateful")
"""Backends whose transfers begin in one kernel and end in another, which JAX's simulator of kernels
cannot do.
"""
CPU_DEVICES = 4  # into which a CPU is divided
FORGETS = "JAX's simulator forgets transfers that outlive a kernel"
type Facts = dict[str, Any]  # of a machine, as JSON has them


SHAPES = {
    "all_gather_matmul": "brf ff",
    "matmul_reduce_scatter": "bRf ff",
    "matmul_all_reduce": "bRf ff",
    "mesh_matmul": "mx yf",
    "expert_mlp": "rf re re eff eff eff",
    "ring_attention": "bshd bskd",
    "lookup_reduce_scatter": "bR ff",
    "ppermute": "rf",
    "all_to_all": "Rf",
    "prefetch": "rf",
    "attention": "bshd bskd",
    "expert_products": "rf re re eff eff eff",
}
"""The shapes of the operands on one device: a letter for each dimension, see `_lengths`."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The lengths from which the shapes of all ops are made; each is a multiple of what the kernels
    need.
    """

    batch: int
    rows: int  # of products
    sequence: int
    features: int
    head: int
    heads: int
    dtype: str = "bfloat16"


SMALL = Size(1, 32, 256, 256, 64, 2, "float32")  # of CPU devices, where kernels are simulated
REHEARSED = Size(2, 128, 128, 512, 128, 4)  # of a quick rehearsal, which compiles every case
QUICK = Size(2, 512, 512, 1024, 128, 8)
FULL = Size(2, 1024, 1024, 4096, 128, 16)


@dataclasses.dataclass(frozen=True)
class Case:
    """One op with one backend."""

    op: str
    backend: str
    mesh: tuple[int, ...]  # the sizes of the mesh axes, of which mesh_matmul has two
    shapes: tuple[Shape, ...]  # of the operands on one device, as `flaxasync.plan` takes them
    dtype: str = "bfloat16"
    directions: choose.Directions = None  # of the ring; None lets the op choose
    # "int8" or "fp8": the type in which all products are multiplied
    quantization: Kind | None = None
    keeps: bool = False  # whether all_gather_matmul may keep the gathered x for its weight gradient

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    @property
    def plain(self) -> str:
        """The backend of the op that is plain XLA."""
        return BACKENDS[self.op][0]

    @property
    def is_kernel(self) -> bool:
        """Whether the backend is made of TPU kernels."""
        return self.backend not in trust.PLAIN

    @property
    def is_pair(self) -> bool:
        """Whether transfers begin in one kernel and end in another."""
        return self.backend in (*PAIRS, "exchange")

    @property
    def verified(self) -> list[str]:
        """The names of `trust.key` under which the verdict is stored.

        On one device nothing travels, and a case says nothing about a kernel that sends. A case of
        ring attention says something about the kernel "flash", too, if TPUs multiply its blocks
        with it. Without a direction, ring attention takes one that the kernel can serve.
        """
        names = []
        if self.is_kernel and (self.devices > 1 or self.op in trust.SEND_NOTHING):
            names.append(trust.key(self.op, self.backend, self.mesh, self.quantization))
        if self.op == "ring_attention" and self.devices > 1:
            _, rows, _, head = self.shapes[0]
            block = rows // (self.directions or 1)
            if flash_lacks(jnp.dtype(self.dtype), head, rows, block) is None:
                names.append(trust.key("attention", "flash", 1))
        return names

    @property
    def text(self) -> str:
        """The case as JSON, under which its verdict is stored."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def label(self) -> str:
        parts = [f"{self.op:22} {self.backend}"]
        if self.directions is not None:
            parts.append(f"directions={self.directions}")
        if self.quantization is not None:
            parts.append(self.quantization)
        if self.keeps:
            parts.append("may keep")
        return " ".join(parts)


def list_cases(
    platform: str,
    devices: int,
    *,
    quick: bool,
    only: Sequence[str] = (),
    rehearse: bool = False,
) -> list[Case]:
    """Returns the cases for so many devices of a "tpu", "gpu" or "cpu".

    Quick cases have small shapes, and smaller ones in a rehearsal; the shapes of CPUs are small in
    any case. `only` names ops, such as "all_gather_matmul", or "attention/flash" with a backend,
    beside which the plain one is timed; all by default. An unknown name raises ValueError.
    """
    chosen: set[tuple[str, str]] = set()
    for name in only or BACKENDS:
        op, _, backend = name.partition("/")
        backends = BACKENDS.get(op, ())
        if backend in backends:
            backends = (backends[0], backend)
        elif backend or not backends:
            known = "; ".join(f"{op}: {', '.join(names)}" for op, names in BACKENDS.items())
            raise ValueError(f"--ops got {name!r}: it must be OP or OP/BACKEND of {known}")
        chosen |= {(op, one) for one in backends}
    size = FULL
    if platform == "cpu":
        size = SMALL
    elif quick and rehearse:
        size = REHEARSED
    elif quick:
        size = QUICK
    cases = []
    for op, backends in BACKENDS.items():
        for backend in backends:
            if (op, backend) in chosen:
                in_8_bits = backend in IN_8_BITS and op in MATMULS and (op, "fused") in chosen
                cases += _variants(_case(op, backend, devices, size), in_8_bits)
    return cases


def small(case: Case) -> Case:
    """Returns the case whose values stand for those of a TPU case in a rehearsal.

    It is the same op, backend and directions with small shapes on up to four CPU devices, where
    kernels are simulated.
    """
    found = _case(case.op, case.backend, min(case.devices, CPU_DEVICES), SMALL)
    return dataclasses.replace(case, mesh=found.mesh, shapes=found.shapes, dtype=found.dtype)


def unsupported(case: Case, platform: str) -> str | None:
    """Returns why a case cannot run on a machine, or None if the op itself finds out."""
    if case.devices == 1 and case.op in MOVES:
        return "needs several devices"
    runs_anywhere = not case.is_kernel or case.backend in choose.ON_EVERY_DEVICE
    can_simulate = platform == "cpu" and not case.is_pair
    if platform == "tpu" or runs_anywhere or can_simulate:
        return None
    return "needs TPUs"


def _case(op: str, backend: str, devices: int, size: Size) -> Case:
    if op in trust.SEND_NOTHING and size is SMALL:  # the simulator runs one device after the other
        devices = 1
    mesh: tuple[int, ...] = (devices,)
    if op == "mesh_matmul":
        x = math.gcd(devices, 2)
        mesh = (x, devices // x)
    lengths = _lengths(size, mesh)
    shapes = tuple(tuple(lengths[letter] for letter in word) for word in SHAPES[op].split())
    return Case(op, backend, mesh, shapes, size.dtype)


def _variants(case: Case, in_8_bits: bool) -> list[Case]:
    """Returns a case in each direction, also in the types of 8 bits."""
    ways: tuple[choose.Directions, ...] = (None,)
    if case.op in RINGS and case.devices > 2 and case.backend not in ("none", "exchange"):
        ways = (1, 2)
    found = [dataclasses.replace(case, directions=way) for way in ways]
    if in_8_bits:
        found += [
            dataclasses.replace(one, quantization=kind) for kind in get_args(Kind) for one in found
        ]
    if case.op == "all_gather_matmul" and case.backend == "fused":
        # Where the plan keeps x, its products in 8 bits are those of another kernel than where x
        # travels again.
        found += [dataclasses.replace(one, keeps=True) for one in found if one.quantization]
    return found


def _lengths(size: Size, mesh: Sequence[int]) -> dict[str, int]:
    """Returns the length of each dimension of `SHAPES` on one device."""
    return {
        "b": size.batch,
        "r": size.rows,
        "R": size.rows * math.prod(mesh),  # the rows of all devices
        "f": size.features,
        "m": size.rows * mesh[-1],
        "x": size.features * mesh[0] // 2,
        "y": size.features * mesh[-1] // 2,
        "e": 2,  # experts of a device, of which a row chooses as many
        "s": size.sequence,
        "h": size.heads,
        "k": size.heads // 2,  # heads of keys and values
        "d": size.head,
    }
