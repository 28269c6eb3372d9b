"""`timeline`: estimates the work, the transfers and the stalls of each device, for a scheduled
program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flaxasync.check.estimate.costs import Costs, KernelTime
from flaxasync.check.estimate.lockstep import Lockstep
from flaxasync.check.estimate.timeline import FROM_TEXT, KERNELS_PLAYED, KINDS, DeviceTime, Timeline
from flaxasync.check.hlo.async_operations import KERNEL
from flaxasync.check.hlo.load import chip_of, module_of
from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.shapes import HOST
from flaxasync.hardware import Chip
from flaxasync.hardware import chip as chip_named

_KNOWN_ERROR = {
    "v5e": "+2.4 % on the one program with a published time, the 2x2 jnp.matmul of docs/check.md "
    "(12.05 ms measured, 12.34 estimated)"
}
_GPU_CALLS = ("__cublas", "__cudnn", "__cusolver", "__triton")
# in a backend_config: XLA for GPUs writes the first to what it runs
_GPU_NOTES = ('"operation_queue_id"', '"__triton')


def timeline(
    compiled: Any,
    chip: str | None = None,
    *,
    kernels: Mapping[str, float] | None = None,
    copies: str = "cycles",
    played: Mapping[str, KernelTime] | None = None,
    notes: Sequence[str] = (),
) -> Timeline:
    """Does what `fa.check.timeline` says. What kernels took in a simulation is in `played`, by
    their names.
    """
    module = module_of(compiled)
    named = chip or chip_of(compiled)
    if named is None:
        raise ValueError(
            "chip must be given for a text, which does not name it: chip='v5e', for example"
        )
    if not module.is_scheduled:
        raise ValueError(
            f"{module.name or 'the text'} is not scheduled, so it has no order to put in time: "
            "compile it first (jitted.lower(...).compile(), or compile_for)"
        )
    if copies not in ("bytes", "cycles", "simulated"):
        raise ValueError(f"copies must be 'cycles', 'bytes' or 'simulated': got {copies!r}")
    on = chip_named(named)
    costs = Costs(module, on, kernels or {}, copies, played or {})
    lockstep = Lockstep(costs)
    lockstep.run()
    devices = tuple(_device_time(lockstep, n) for n in range(len(lockstep.devices)))
    basis = _basis(on, copies)
    preference = FROM_TEXT
    if played:
        basis = f"kernels as they were simulated one by one, {basis}"
        preference = KERNELS_PLAYED
    return Timeline(
        name=module.name,
        chip=on.name,
        basis=basis,
        known_error=_KNOWN_ERROR.get(on.name, f"none measured on {on.name}"),
        slices=tuple(lockstep.slices),
        devices=devices,
        notes=(*_notes(lockstep), *notes),
        loops=tuple(lockstep.loops),
        flops=costs.product_flops(),
        preference=preference,
    )


def limits(module: HloModule, chip: str) -> list[str]:
    """Returns what the estimate of a program does not know: the times that are really those of
    other hardware.
    """
    instructions = module.instructions
    between_slices = sum(
        i.opcode == "send" and "megascale" in i.attributes.get("frontend_attributes", "")
        for i in instructions
    )
    copies = [i for i in instructions if i.opcode == "copy" or i.opcode.endswith("-start")]
    with_host = sum(any(leaf.memory_space == HOST for _, leaf in i.shape.leaves()) for i in copies)
    notes = []
    if any(map(_is_for_gpus, instructions)):
        notes.append(
            "this is a program for GPUs, whose times are not known: all times and gains are as on "
            f"a {chip}; what runs in a window, and the rules, are facts of the text"
        )
    if between_slices:
        notes.append(
            f"{_transfers(between_slices)} between slices, over a network whose speed the text "
            f"does not name: timed as on a link of a {chip}, which is faster"
        )
    if with_host:
        rate = chip_named(chip).host_bandwidth
        timed = "as within HBM, which is faster"
        if rate is not None:
            timed = f"at {rate / 1e9:g} GB/s of PCIe in each direction"
        notes.append(f"{_transfers(with_host)} to or from the memory of the host: timed {timed}")
    return notes


def _is_for_gpus(i: Instruction) -> bool:
    config = i.attributes.get("backend_config", "")
    return i.custom_call_target.startswith(_GPU_CALLS) or any(n in config for n in _GPU_NOTES)


def _transfers(count: int) -> str:
    if count == 1:
        return "1 transfer goes"
    return f"{count} transfers go"


def _device_time(lockstep: Lockstep, n: int) -> DeviceTime:
    kinds = dict.fromkeys(KINDS, 0.0)
    causes = dict[str, float]()
    sources = dict[str, float]()
    for (kind, cause, source), seconds in lockstep.seconds[n].items():
        kinds[kind] += seconds
        sources[source] = sources.get(source, 0.0) + seconds
        if cause:
            causes[cause] = causes.get(cause, 0.0) + seconds
    return DeviceTime(
        device=lockstep.devices[n],
        seconds=lockstep.clock[n],
        compute=kinds["compute"],
        exposed=kinds["stall"] + kinds["collective"],
        memory=kinds["memory"],
        causes=causes,
        sources=sources,
    )


def _notes(lockstep: Lockstep) -> tuple[str, ...]:
    notes = []
    module = lockstep.module
    shown = len(lockstep.devices)
    count = module.num_devices
    if shown == 1 < count:
        notes.append(f"all {count} devices do the same: one is shown")
    elif shown < count:
        notes.append(f"the first {shown} of {count} devices are shown")
    by_bytes = [
        i.name
        for i in lockstep.costs.executed
        if i.custom_call_target == KERNEL and lockstep.costs.explained(i).source == "bytes"
    ]
    if by_bytes:
        named = ", ".join(by_bytes[:4])
        if len(by_bytes) > 4:
            named += " ..."
        notes.append(
            f"Pallas kernels without a cost estimate count as their bytes: {named}; give "
            f"kernels={{name: seconds}}"
        )
    return (*notes, *limits(module, lockstep.costs.chip.name))


def _basis(chip: Chip, copies: str) -> str:
    if copies == "cycles":
        estimated = "matmuls and copies"
    else:
        estimated = "matmuls"
    return (
        f"the compiler's cycle estimates of {estimated} at {chip.clock / 1e9:g} GHz, other work by "
        f"its bytes in HBM of {chip.hbm_bandwidth / 1e9:g} GB/s at {chip.hbm_efficiency:.0%}, "
        f"links of {chip.link_bandwidth / 1e9:g} GB/s in each direction; nothing was run"
    )
