"""`CompiledProgram`: what the TPU compiler made of a function. The file needs the standard library only."""

import dataclasses
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the TPU compiler made of a function, on one device of a topology. It cannot be run."""

    text: str  # HLO, after optimization and scheduling
    topology: str
    memory: Mapping[str, int]  # the entries `*_in_bytes` of JAX's memory analysis for one device
    cost: Mapping[str, float]  # XLA's cost analysis
    coords: tuple[tuple[int, ...], ...]  # the chip of each partition, in the order of the mesh
    dumps: pathlib.Path | None = None  # the folder with libtpu's final bundles, if they were asked for
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # the sizes of the mesh axes, in their order

    @property
    def chip(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """The bytes that a device needs: arguments, outputs, temporaries, code, and their total.

        An output that reuses the memory of a donated argument is counted with that argument only.
        """
        m = self.memory
        kinds = {
            "arguments": m["argument_size_in_bytes"],
            "outputs": m["output_size_in_bytes"] - m["alias_size_in_bytes"],
            "temporaries": m["temp_size_in_bytes"],
            "code": m["generated_code_size_in_bytes"],
        }
        return kinds | {"total": sum(kinds.values())}

    # The methods of jax.stages.Compiled, for code that takes either.

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> Any:
        return types.SimpleNamespace(**self.memory)

    def cost_analysis(self) -> dict[str, float]:
        return dict(self.cost)


# Is called with every program that `compile_for` makes, and with the seconds that it took. `capture` adds itself.
listeners: list[Callable[[CompiledProgram, float], None]] = []
