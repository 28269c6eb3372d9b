"""How long each instruction takes on a chip, as far as the program's text tells.

| instruction | its time |
|---|---|
| a matmul, alone or in a fusion | the compiler's cycle estimate (8 % long for a large one, measured on v5e) |
| a copy | the compiler's cycle estimate |
| other work | its bytes at the rate that a copy reaches, or the cycle estimate where that is shorter |
| a collective, alone or in a fusion | its bytes on the links (collectives.py) |
| a loop, branch or call | that of its body, times its trips; of the longest branch |
| a Pallas kernel | what the caller gives; else its `cost_estimate` at the peak, or its bytes where those take longer |

The compiler's estimates of work without a matmul are long: broadcasts and additions in HBM come out up to twice too
long, so they are held to their bytes. Copies keep the estimate that the compiler itself schedules by. It is longest
within vector memory: a copy of 16 MiB is put at 184 512 cycles on v5e, its final bundles take 6 700. `copies="bytes"`
holds copies to their bytes, too. A Pallas kernel that was written without a `cost_estimate` counts as its bytes, and is
noted.
"""

import dataclasses
import re
from collections.abc import Mapping

from flaxasync.check.hlo.async_operations import COLLECTIVES, AsyncOperation
from flaxasync.check.hlo.module import HBM, SEMAPHORE, VMEM, Computation, HloModule, Instruction
from flaxasync.check.hlo.participants import collective_seconds, permute_pairs, replica_groups
from flaxasync.check.hlo.trip_count import trip_count
from flaxasync.hardware import Chip

FREE = frozenset(
    [
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "optimization-barrier",
        "add-dependency",
        "domain",
        "opt-barrier",
        "get-dimension-size",
    ]
)
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the instructions of one module on one chip."""

    module: HloModule
    chip: Chip
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds by name, or by name without number
    copies: str = "cycles"  # or "bytes": what the time of a copy rests on
    known: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict, repr=False)

    def seconds(self, computation: Computation, instruction: Instruction) -> float:
        """Returns the time that the core spends on an instruction; 0 for a start, a done and a name."""
        return self.explained(computation, instruction)[0]

    def explained(self, computation: Computation, instruction: Instruction) -> tuple[float, str]:
        """Returns the time and what it rests on: cycles, links, bytes, given, estimate, body or nothing."""
        key = f"{computation.name}/{instruction.name}"
        if key not in self.known:
            self.known[key] = (0.0, "nothing")  # a computation that calls itself costs nothing more
            self.known[key] = self._explain(computation, instruction)
        return self.known[key]

    def computation_seconds(self, name: str) -> float:
        computation = self.module.computations.get(name.lstrip("%"))
        return sum(self.seconds(computation, i) for i in computation.instructions) if computation else 0.0

    def trips(self, loop: Instruction) -> int:
        """Returns how often a loop runs; 1 where the text does not tell."""
        count = trip_count(self.module, loop)
        return 1 if count is None else count

    def transfer_seconds(self, operation: AsyncOperation) -> float:
        """Returns how long an asynchronous operation is under way, alone on its link or memory."""
        computation = self.module.computations[operation.computation]
        if operation.spelling == "kernel":
            name = operation.start.name
            given = self.kernels.get(name, self.kernels.get(_stem(name)))
            if given is not None:
                return given
            if not operation.communicates:
                return self._hbm_seconds(2 * operation.bytes)
            return self.chip.hop_latency + operation.bytes / self.chip.link_bandwidth
        if operation.communicates:
            body = operation.inner or operation.start
            sent = self._operand_bytes(computation, operation.start) or operation.bytes
            if operation.updates and not operation.start.operands:  # operands arrive late
                sent = max(sent, self._operand_bytes(computation, operation.updates[0], skip=1))
            return collective_seconds(operation.kind, sent, operation.bytes, self.group(body), self.chip)
        return self._hbm_seconds(2 * operation.bytes)

    def group(self, instruction: Instruction) -> int:
        """Returns how many devices take part in one group of a collective."""
        if pairs := permute_pairs(instruction):
            return max(2, len(pairs))
        return max(len(g) for g in replica_groups(instruction, self.module.num_partitions))

    def _explain(self, computation: Computation, i: Instruction) -> tuple[float, str]:
        if i.opcode in FREE or i.opcode.endswith(("-start", "-done", "-update")) or i.opcode in ("send", "recv"):
            return 0.0, "nothing"
        if i.opcode == "while":
            once = sum(self.computation_seconds(i.attributes.get(part, "")) for part in ("body", "condition"))
            return self.trips(i) * once, "body"
        if i.opcode == "conditional":
            return max((self.computation_seconds(name) for name in i.called_computations), default=0.0), "body"
        if i.opcode == "call":
            return sum(self.computation_seconds(name) for name in i.called_computations), "body"
        if i.opcode in COLLECTIVES:
            sent = self._operand_bytes(computation, i)
            return collective_seconds(i.opcode, sent, i.shape.bytes, self.group(i), self.chip), "links"
        if i.opcode == "custom-call":
            return self._custom_call(computation, i)
        if i.opcode == "fusion" and (collective := self.fused_collective(i)) is not None:
            if collective.opcode == "custom-call":
                return 0.0, "nothing"  # a start or a done
            sent = self._operand_bytes(computation, i)
            kind = "reduce-scatter" if collective.opcode == "all-reduce" and i.shape.bytes < sent else collective.opcode
            return collective_seconds(kind, sent, i.shape.bytes, self.group(collective), self.chip), "links"
        cycles, moved = i.estimated_cycles, self._bytes_seconds(computation, i)
        as_estimated = self.multiplies(i) or (i.opcode == "copy" and self.copies == "cycles")
        if cycles is not None and (as_estimated or cycles / self.chip.clock < moved):
            return cycles / self.chip.clock, "cycles"
        return moved, "bytes"

    def _custom_call(self, computation: Computation, i: Instruction) -> tuple[float, str]:
        given = self.kernels.get(i.name, self.kernels.get(_stem(i.name)))
        if given is not None:
            return given, "given"
        if i.custom_call_target in _FREE_CALLS:
            return 0.0, "nothing"
        semaphores = any(leaf.memory_space == SEMAPHORE for _, leaf in i.shape.leaves()) or any(
            leaf.memory_space == SEMAPHORE
            for o in i.operands
            if (made := computation.by_name.get(o))
            for _, leaf in made.shape.leaves()
        )
        if semaphores:
            return 0.0, "nothing"  # half of an asynchronous pair
        moved, flops = self._bytes_seconds(computation, i), _own_flops(i)
        return (moved, "bytes") if flops is None else (max(moved, flops / self.chip.flops), "estimate")

    def fused_collective(self, fusion: Instruction) -> Instruction | None:
        """Returns the collective that a fusion performs, or the mark of a start or a done; None for a fusion without.

        A fusion that computes while a collective is under way holds it, too, with its progress noted: it is none.
        """
        inside = [
            i
            for name in fusion.called_computations
            if name in self.module.computations
            for i in self.module.computations[name].instructions
        ]
        marks = [i for i in inside if i.custom_call_target.startswith("AsyncCollective")]
        collectives = [i for i in inside if i.opcode in COLLECTIVES]
        if marks or not collectives:
            return marks[0] if marks else None
        config = collectives[0].attributes.get("backend_config", "")
        return None if "async_collective_fusion_config" in config else collectives[0]

    def multiplies(self, i: Instruction) -> bool:
        """Says whether an instruction holds a matmul, however deep in its fusions."""
        if i.opcode in ("convolution", "dot"):
            return True
        return i.opcode == "fusion" and any(
            self.multiplies(inner)
            for name in i.called_computations
            if name in self.module.computations
            for inner in self.module.computations[name].instructions
        )

    def _bytes_seconds(self, computation: Computation, i: Instruction) -> float:
        arrays = [i.shape] + [made.shape for o in i.operands if (made := computation.by_name.get(o))]
        if i.opcode in ("dynamic-slice", "slice", "gather"):
            arrays = [i.shape, i.shape]
        elif i.opcode == "dynamic-update-slice" and len(arrays) > 2:
            arrays = [arrays[2], arrays[2]]
        leaves = [leaf for array in arrays for _, leaf in array.leaves()]
        moved = sum(leaf.bytes for leaf in leaves if leaf.memory_space == HBM)
        kept = max((leaf.bytes for leaf in leaves if leaf.memory_space == VMEM), default=0)
        return max(self._hbm_seconds(moved), kept / (self.chip.vmem_bytes_per_cycle * self.chip.clock))

    def _hbm_seconds(self, moved: int) -> float:
        return moved / (self.chip.hbm_bandwidth * self.chip.hbm_efficiency)

    def _operand_bytes(self, computation: Computation, i: Instruction, skip: int = 0) -> int:
        made = (computation.by_name.get(o) for o in i.operands[skip:])
        return sum(m.shape.bytes for m in made if m is not None)


def _own_flops(kernel: Instruction) -> int | None:
    """Returns the FLOPs of the `cost_estimate` that a Pallas kernel was written with; None without one."""
    found = re.search(r'"cost_estimate":\{"flops":"(\d+)"', kernel.attributes.get("backend_config", ""))
    return int(found[1]) if found else None


def _stem(name: str) -> str:
    head, _, tail = name.rpartition(".")
    return head if tail.isdigit() and head else name
