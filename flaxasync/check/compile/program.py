"""What a compiler made of a function: a `CompiledProgram`, or an `HbmError` if the program
does not fit.
"""

import dataclasses
import pathlib
import re
import types
from collections.abc import Mapping
from typing import Any

from flaxasync.hardware import GIB, Gpu

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = r"([\d.]+)([KMGTP]?)i?B?"
# The compiler prints the first message before it lays out the memory, and the second one after
# that.
_MESSAGES = (
    re.compile(
        rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"
    ),
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} hbm"),
)


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What a compiler made of a function, on one device of a topology. It cannot be run."""

    text: str  # HLO, after optimization and scheduling
    topology: str
    memory: Mapping[str, int]  # the sizes in JAX's memory analysis, for one device
    cost: Mapping[str, float]  # XLA's cost analysis; {} for GPUs
    # the chip of each partition, and its core where a chip has several; the slice, host and number
    # of each GPU
    coords: tuple[tuple[int, ...], ...]
    # the folder with libtpu's final bundles, if they were asked for
    dumps: pathlib.Path | None = None
    # the sizes of the mesh axes, in their order
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    libtpu: str = ""  # the version that compiled it; "" if it is not known, and for GPUs

    @property
    def chip(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """The bytes that a device needs, as `bytes_by_kind` counts them."""
        return bytes_by_kind(self.memory_analysis())

    # The methods of jax.stages.Compiled, for code that takes either.

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> Any:
        return types.SimpleNamespace(**self.memory)

    def cost_analysis(self) -> dict[str, float]:
        return dict(self.cost)


def bytes_by_kind(m: Any) -> dict[str, int]:
    """Counts the bytes that a device needs by the memory analysis of a compiled program: arguments,
    outputs, temporaries, code, and their total.

    An output that reuses the memory of a donated argument is counted with that argument only.
    Temporaries are what is left of all allocations, by which the compiler decides whether a program
    fits. `temp_size_in_bytes` of libtpu 0.0.50 is greater for some programs with loops, by 6 GiB
    for a step of an 8B model.
    """
    arguments = m.argument_size_in_bytes
    outputs = m.output_size_in_bytes - m.alias_size_in_bytes
    rest = max(m.total_allocation_bytes - arguments - outputs, 0)
    kinds = {
        "arguments": arguments,
        "outputs": outputs,
        "temporaries": min(m.temp_size_in_bytes, rest),
        "code": m.generated_code_size_in_bytes,
    }
    return kinds | {"total": sum(kinds.values())}


class HbmError(RuntimeError):
    """The program needs more HBM than a device has: `needed` of `available` bytes, as the compiler
    rounds them.

    `needed` includes arguments and outputs, and `available` is what programs can use.
    """

    def __init__(self, message: str, needed: int, available: int):
        super().__init__(message)
        self.needed = needed
        self.available = available


def check_memory(program: CompiledProgram, gpu: Gpu) -> None:
    """Raises HbmError if a program for GPUs needs more than their memory, about which the compiler
    for GPUs says nothing.
    """
    needed = program.bytes_by_kind["total"]
    if needed > gpu.hbm_bytes:
        message = (
            f"the program needs {needed / GIB:.2f} GiB of the {gpu.hbm_bytes / GIB:.2f} that "
            f"{gpu.name} has"
        )
        raise HbmError(message, needed, int(gpu.hbm_bytes))


def hbm_error(message: str) -> HbmError | None:
    """Returns the error for a message of the compiler; None if the message is about something
    else.
    """
    for pattern in _MESSAGES:
        if match := pattern.search(message):
            needed, available = (round(float(match[n]) * _UNITS[match[n + 1]]) for n in (1, 3))
            return HbmError(f"the TPU compiler refused: {message}", needed, available)
    return None
