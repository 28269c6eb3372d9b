"""How long each instruction takes on a chip, estimated from the text of the program.

docs/check.md has a table of what takes which time. The compiler's estimates of work without a
matmul are too long: for broadcasts and additions in HBM by up to a factor of two, and for the
slices and updates of stacked layers the more, the more layers there are. Such work is therefore
never charged more than its bytes (moved_bytes.py). Copies keep the estimate, because the compiler
itself schedules by it. `copies="bytes"` charges copies by their bytes, too. `copies="simulated"`
also knows that those from or to vector memory are slower where they change the layout, and that
the core sees the last byte of such work a latency later. Within HBM a new layout makes no
difference: a transposing copy of 192 MiB on v6e takes 0.308 ms in the simulator and 0.303 by its
bytes, of 1.121 estimated. A Pallas kernel without a `cost_estimate` is charged by its bytes.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flaxasync.check.estimate.moved_bytes import moved_bytes
from flaxasync.check.estimate.product_flops import flops_of
from flaxasync.check.estimate.torus import Torus, torus_of
from flaxasync.check.hlo.async_operations import (
    COLLECTIVES,
    AsyncOperation,
    collective_in_fusion,
    step_of,
)
from flaxasync.check.hlo.module import (
    CONTROL_FLOW,
    Computation,
    HloModule,
    Instruction,
    without_number,
)
from flaxasync.check.hlo.participants import groups_in, permute_pairs
from flaxasync.check.hlo.shapes import HBM, SEMAPHORE, VMEM
from flaxasync.check.hlo.trip_count import trip_count
from flaxasync.hardware import DEVICES_PER_CHIP, Accelerator, Chip

# Opcodes that name, group or order values and take no time.
_FREE = frozenset(
    """
    parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id optimization-barrier
    add-dependency domain opt-barrier get-dimension-size
    """.split()  # noqa: SIM905, one a line would fill the page
)
FREE_CALLS = (
    "AllocateBuffer",
    "ConcatBitcast",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
)


class CoreTime(NamedTuple):
    """The time that the core spends on an instruction, in seconds."""

    seconds: float
    # "cycles", "links", "bytes", "played", "given", "estimate", "body" or "nothing"
    source: str
    exposed: float = 0.0  # of a kernel: in which it waits for other devices, as far as is known


NO_TIME = CoreTime(0.0, "nothing")


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """What a kernel, or a transfer from its start to its done, takes on its slowest device, by
    simulation.
    """

    seconds: float
    exposed: float  # the seconds of it in which the device waits for other devices
    guessed: bool = False
    """Whether it reads scalars that the program does not determine, and that are taken as 0, such
    as the sizes of groups. Then it may have done nothing: its own estimate, of all it can have to
    do, counts where that is longer."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """The times of the instructions of one module on one chip, in seconds.

    Those of a GPU are in gpu_costs.py.
    """

    module: HloModule
    chip: Accelerator
    # that the caller gives, by `_given`
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)
    copies: str = "cycles"  # or "bytes" or "simulated": what the time of a copy is taken from
    # by the name of the kernel or start
    played: Mapping[str, KernelTime] = dataclasses.field(default_factory=dict)
    # What is known already: by the names of a computation and an instruction, and by the name of a
    # computation.
    _known: dict[tuple[str, str], CoreTime] = dataclasses.field(default_factory=dict, repr=False)
    _totals: dict[str, float] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def tpu(self) -> Chip:
        """The chip, with what only a TPU has."""
        assert isinstance(self.chip, Chip)
        return self.chip

    def lane(self, operation: AsyncOperation) -> str:
        """Returns the name of the lane of a transfer between devices where one carries all of a
        device's; "" where each direction of each ring has its own, as on TPUs.
        """
        return ""

    def seconds(self, instruction: Instruction) -> float:
        """Returns the time that the core spends on an instruction. A start and a done take none."""
        return self.explained(instruction).seconds

    def explained(self, instruction: Instruction) -> CoreTime:
        """Returns the time of an instruction, and what it was taken from."""
        if _takes_no_time(instruction.opcode):
            # which is not kept: a large program has more of these than of all others
            return NO_TIME
        key = (instruction.computation.name, instruction.name)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._explain(instruction)
        return found

    def total_seconds(self, computation: Computation) -> float:
        if computation.name not in self._totals:
            self._totals[computation.name] = sum(self.seconds(i) for i in computation.instructions)
        return self._totals[computation.name]

    def trips(self, caller: Instruction) -> int:
        """Returns how often an instruction runs what it calls: the trip count of a loop, and 1 if
        the text does not determine it.
        """
        if caller.opcode != "while":
            return 1
        count = trip_count(caller)
        if count is None:
            return 1
        return count

    def taken(self, caller: Instruction) -> list[Computation]:
        """Returns which of the computations that control flow calls it runs: of a conditional the
        branch that takes longest.
        """
        if caller.opcode == "conditional":
            return sorted(caller.called, key=self.total_seconds, reverse=True)[:1]
        return caller.called

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation of the control flow runs: the entry, loop bodies, branches and
        calls. Every branch counts as if it were the one that is taken.
        """
        module = self.module
        # the calls of each computation that runs
        calls: dict[str, list[Instruction]] = {module.entry.name: []}
        pending = [module.entry]
        while pending:
            for i in pending.pop().instructions:
                if i.opcode in CONTROL_FLOW:
                    for name in dict.fromkeys(i.called_computations):
                        if name not in calls:
                            calls[name] = []
                            pending.append(module.computations[name])
                        calls[name].append(i)
        runs = {module.entry.name: 1}

        def count(name: str) -> int:
            if name not in runs:
                runs[name] = sum(self.trips(i) * count(i.computation.name) for i in calls[name])
            return runs[name]

        return {name: count(name) for name in calls}

    @property
    def executed(self) -> list[Instruction]:
        """The instructions of the computations that run."""
        return [i for name in self.runs for i in self.module.computations[name].instructions]

    def product_flops(self) -> float:
        """Returns the FLOPs of a device's matrix products in one run. Those of kernels are their
        cost estimates.
        """
        known: dict[str, float] = {}  # without what control flow runs
        whole: dict[str, float] = {}

        def flops(computation: Computation) -> float:
            if computation.name not in whole:
                total = flops_of(computation, known)
                for i in computation.instructions:
                    if i.opcode in CONTROL_FLOW:
                        total += self.trips(i) * sum(map(flops, self.taken(i)))
                whole[computation.name] = total
            return whole[computation.name]

        return flops(self.module.entry)

    def transfer_seconds(self, operation: AsyncOperation) -> float:
        """Returns how long an asynchronous operation is under way when it is alone on its link or
        in its memory.
        """
        if operation.spelling == "kernel":
            given = self._given(operation.name)
            if given is not None:
                return given
            if operation.name in self.played:
                return self.played[operation.name].seconds
            if operation.communicates:
                return self.chip.hop_latency + operation.bytes / self.chip.link_bandwidth
        if operation.start.opcode == "async-start" and operation.collectives:
            return sum(self._wrapped_seconds(one, operation) for one in operation.collectives)
        if operation.communicates:
            collective = operation.inner or operation.start
            sent = self._operand_bytes(operation.start) or operation.bytes
            if not operation.start.operands:  # updates bring the operands, after the future
                bound = sum(self._operand_bytes(one, skip=1) for one in operation.updates)
                sent = max(sent, bound)
            return self._collective_seconds(
                collective, operation.kind, sent, operation.bytes, beside=[operation.start]
            )
        if operation.with_host and self.chip.host_bandwidth is not None:
            return operation.bytes / self.chip.host_bandwidth
        return self.memory_seconds(self._ends_in_hbm(operation) * operation.bytes)

    def memory_latency(self) -> float:
        """Returns the seconds from the last byte of a transfer within the device until the core
        sees it.

        Only the simulator counts them. They matter to small programs alone.
        """
        if self.copies != "simulated":
            return 0.0
        return self.tpu.memory_latency

    def _ends_in_hbm(self, copy: AsyncOperation) -> int:
        """Returns how often a byte of a copy passes HBM: as it is read, as it is written, or
        both.
        """
        read = [made.shape for made in copy.start.inputs[:1]]
        written = [window.done.shape for window in copy.windows[:1]]
        beside = sum(shape.memory_space == VMEM for shape in read + written)
        return 2 - beside

    def _wrapped_seconds(self, collective: Instruction, operation: AsyncOperation) -> float:
        """Returns the seconds of a collective that an asynchronous operation wraps, alone or within
        a fusion.
        """
        sent = self._operand_bytes(collective)
        received = collective.shape.bytes
        kind = collective.opcode.removesuffix("-start")
        if collective.opcode != kind and collective.shape.is_tuple and kind != "all-reduce":
            # the first part is what is sent
            received = (collective.shape.at((1,)) or collective.shape).bytes
        fusions = [call for call in collective.computation.callers if call.opcode == "fusion"]
        if kind == "all-reduce" and fusions and fusions[0].shape.bytes < sent:
            kind = "reduce-scatter"  # as XLA writes it: an all-reduce, and a slice of the sum
        return self._collective_seconds(
            collective, kind, sent, received, beside=[operation.start, *fusions]
        )

    def _explain(self, i: Instruction) -> CoreTime:
        if i.opcode in CONTROL_FLOW:
            seconds = sum(map(self.total_seconds, self.taken(i)))
            return CoreTime(self.trips(i) * seconds, "body")
        if i.opcode in COLLECTIVES:
            return CoreTime(self._synchronous_seconds(i, i), "links")
        if i.opcode == "custom-call":
            return self._custom_call(i)
        if i.opcode == "fusion" and (collective := collective_in_fusion(i)) is not None:
            if collective.opcode == "custom-call":
                return NO_TIME  # the fusion is a start or a done
            return CoreTime(self._synchronous_seconds(i, collective), "links")
        if i.name in self.kernels:
            return CoreTime(self.kernels[i.name], "given")
        if i.name in self.played:
            return CoreTime(self.played[i.name].seconds, "played")
        moved = self._bytes_seconds(i)
        cycles = i.estimated_cycles
        if cycles is None:
            return CoreTime(moved, "bytes")
        estimated = cycles / self.tpu.clock
        if i.opcode == "copy" and self.copies == "simulated":
            return CoreTime(self._copy_seconds(i, estimated, moved), "bytes")
        as_estimated = i.contains_matmul or (i.opcode == "copy" and self.copies == "cycles")
        if as_estimated or estimated < moved:
            return CoreTime(estimated, "cycles")
        return CoreTime(moved, "bytes")

    def _custom_call(self, i: Instruction) -> CoreTime:
        given = self._given(i.name)
        if given is not None:
            return CoreTime(given, "given")
        if i.custom_call_target in FREE_CALLS:
            return NO_TIME
        both = (i, *i.inputs)
        if any(leaf.memory_space == SEMAPHORE for one in both for _, leaf in one.shape.leaves()):
            return NO_TIME  # one half of an asynchronous pair
        least = CoreTime(self._bytes_seconds(i), "bytes")
        if i.kernel_flops is not None:
            multiplying = i.kernel_flops / self.chip.flops
            least = CoreTime(max(least.seconds, multiplying), "estimate")
        played = self.played.get(i.name)
        if played is None:
            return least
        if played.guessed and least.source == "estimate" and played.seconds < least.seconds:
            return least
        return CoreTime(played.seconds, "played", played.exposed)

    def _given(self, kernel: str) -> float | None:
        return self.kernels.get(kernel, self.kernels.get(without_number(kernel)))

    def _synchronous_seconds(self, i: Instruction, collective: Instruction) -> float:
        """Returns the seconds of a collective, or of the fusion `i` that it is in."""
        sent = self._operand_bytes(i)
        kind = self.collective_kind(i, collective)
        return self._collective_seconds(collective, kind, sent, i.shape.bytes, beside=[i])

    def _collective_seconds(
        self,
        collective: Instruction,
        kind: str,
        sent: int,
        received: int,
        *,
        beside: Sequence[Instruction],
    ) -> float:
        """Returns the seconds of a collective whose algorithm the compiler may have noted at other
        instructions: at its start, or at the fusion that it is in.
        """
        group = self.group_size(collective)
        torus = None
        if group > 4:  # up to four devices have the links of one ring
            notes = " ".join(i.attributes.get("backend_config", "") for i in (*beside, collective))
            chips = self.module.num_devices // DEVICES_PER_CHIP.get(self.chip.name, 1)
            torus = torus_of(notes, group, chips, self.tpu)
        return collective_seconds(kind, sent, received, group, self.chip, torus)

    def collective_kind(self, i: Instruction, collective: Instruction) -> str:
        """Returns the opcode of what a collective does. XLA writes a reduce-scatter as an
        all-reduce and a slice.
        """
        in_fusion = i is not collective and collective.opcode == "all-reduce"
        if in_fusion and i.shape.bytes < self._operand_bytes(i):
            return "reduce-scatter"
        return collective.opcode

    def group_size(self, collective: Instruction) -> int:
        """Returns how many devices take part in one group of a collective."""
        if pairs := permute_pairs(collective):
            return max(2, len(pairs))
        return max(len(g) for g in groups_in(collective))

    def _bytes_seconds(self, i: Instruction) -> float:
        """Returns the time in which the operands and the result of an instruction move through
        memory.
        """
        moved = moved_bytes(i)
        in_hbm = sum(size for space, size in moved if space == HBM)
        in_vmem = max((size for space, size in moved if space == VMEM), default=0)
        moving = max(
            self.memory_seconds(in_hbm),
            in_vmem / (self.tpu.vmem_bytes_per_cycle * self.tpu.clock),
        )
        if in_hbm:
            moving += self.memory_latency()
        return moving

    def _copy_seconds(self, i: Instruction, estimated: float, moved: float) -> float:
        """Returns what the bytes of a copy take, longer where a layout changes in VMEM, if that is
        not estimated.
        """
        shapes = [one.shape for one in (*i.inputs, i)]
        orders = [shape.layout and shape.layout.minor_to_major for shape in shapes]
        if orders[0] == orders[-1] or all(shape.memory_space != VMEM for shape in shapes):
            return min(estimated, moved)
        relaid = i.shape.bytes / (self.tpu.vmem_relayout_bytes_per_cycle * self.tpu.clock)
        return min(estimated, max(moved, relaid))

    def memory_seconds(self, moved: int) -> float:
        """Returns the time in which bytes are read from HBM or written to it."""
        return moved / (self.chip.hbm_bandwidth * self.chip.hbm_efficiency)

    def _operand_bytes(self, i: Instruction, skip: int = 0) -> int:
        return sum(made.shape.bytes for made in i.inputs[skip:])


# a program has few opcodes, and each is asked about in every instruction
@functools.lru_cache(1024)
def _takes_no_time(opcode: str) -> bool:
    """Says whether no instruction of this opcode takes time of the core."""
    return opcode in _FREE or step_of(opcode).role != ""


def collective_seconds(
    opcode: str,
    bytes_in: int,
    bytes_out: int,
    group: int,
    chip: Accelerator,
    torus: Torus | None = None,
) -> float:
    """Returns the seconds of a collective that is alone on its links, by the model of a
    bandwidth-optimal ring.

    A group of two devices has one link; a larger group sends in both directions of its ring at
    once. For large arrays XLA's own collectives are within a few percent of the model. The time of
    small collectives is that of the hops. `bytes_in` and `bytes_out` are those of one device's
    operand and result. A gather or a sum that is known to go around a `torus` sends the same bytes
    on more links; other collectives have no such form.
    """
    if group < 2:
        return 0.0
    volume = sent_on_ring(opcode, bytes_in, bytes_out, group)
    if volume is None:  # a collective-permute sends its operand in one direction
        return chip.hop_latency + bytes_in / chip.link_bandwidth
    directions = 2.0
    hops = group // 2
    if group == 2:
        directions = 1.0
    if torus is not None and opcode in ("all-gather", "reduce-scatter", "all-reduce"):
        directions, hops = torus
    if opcode == "all-reduce":  # around the ring twice
        hops *= 2
    return hops * chip.hop_latency + volume / (directions * chip.link_bandwidth)


def sent_on_ring(opcode: str, bytes_in: int, bytes_out: int, group: int) -> float | None:
    """Returns the bytes that one device of a group of two or more sends, in all directions of the
    ring, its own and those that it hands on; None for an opcode that is no collective of a ring.
    """
    share = (group - 1) / group
    if group == 2:
        exchanged = bytes_in / 2
    else:
        exchanged = bytes_in * group / 4  # R/4 is the mean distance in a ring
    return {
        "all-gather": bytes_out * share,
        "reduce-scatter": bytes_in * share,
        "all-reduce": 2 * bytes_in * share,
        "all-to-all": exchanged,
        "ragged-all-to-all": exchanged,
        "collective-broadcast": bytes_in,
    }.get(opcode)
