"""`timeline`: estimates the work, the transfers and the stalls of each device, for a scheduled
program.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from flaxasync.check.estimate.costs import KernelTime
from flaxasync.check.estimate.costs_of import costs_of
from flaxasync.check.estimate.lockstep import Lockstep
from flaxasync.check.estimate.measured import known_error
from flaxasync.check.estimate.timeline import (
    FROM_TEXT,
    ONLY_FROM_TEXT,
    PARTS_PLAYED,
    DeviceTime,
    Timeline,
)
from flaxasync.check.hlo.async_operations import KERNEL
from flaxasync.check.hlo.gpu_calls import is_for_gpus
from flaxasync.check.hlo.load import chip_of, module_of
from flaxasync.check.hlo.module import HloModule
from flaxasync.check.hlo.shapes import HOST
from flaxasync.hardware import Chip, Gpu, accelerator


def timeline(
    compiled: Any,
    chip: str | None = None,
    *,
    kernels: Mapping[str, float] | None = None,
    copies: str = "cycles",
    played: Mapping[str, KernelTime] | None = None,
    products_played: bool = False,
    notes: Sequence[str] = (),
) -> Timeline:
    """Does what `fa.check.timeline` says. Given seconds of kernels and of products are in
    `kernels`, and what they took in a simulation in `played`, by their names; `products_played`
    says whether products were simulated.
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
    on = accelerator(named)
    costs = costs_of(module, named, program=compiled, kernels=kernels, copies=copies, played=played)
    lockstep = Lockstep(costs)
    lockstep.run()
    devices = tuple(_device_time(lockstep, n) for n in range(len(lockstep.devices)))
    basis = _basis(on, copies)
    preference = FROM_TEXT if isinstance(on, Chip) else ONLY_FROM_TEXT
    error = known_error(on.name, "timeline")
    if played:
        parts = "kernels"
        if products_played:
            parts = "products and kernels"
            error = known_error(on.name, "simulated")
        basis = f"{parts} as they were simulated one by one, {basis}"
        preference = PARTS_PLAYED
    return Timeline(
        name=module.name,
        chip=on.name,
        basis=basis,
        known_error=error,
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
    of_gpu = isinstance(accelerator(chip), Gpu)
    if is_for_gpus(module) and not of_gpu:
        notes.append(
            "this is a program for GPUs, whose times are not known: all times and gains are as on "
            f"a {chip}; what runs in a window, and the rules, are facts of the text. chip='h100' "
            "estimates those of a GPU"
        )
    if between_slices:
        notes.append(
            f"{_transfers(between_slices)} between slices, over a network whose speed the text "
            f"does not name: timed as on a link of a {chip}, which is faster"
        )
    if with_host:
        rate = accelerator(chip).host_bandwidth
        timed = "as within HBM, which is faster"
        if rate is not None:
            timed = f"at {rate / 1e9:g} GB/s of PCIe in each direction"
        notes.append(f"{_transfers(with_host)} to or from the memory of the host: timed {timed}")
    return notes


def _transfers(count: int) -> str:
    if count == 1:
        return "1 transfer goes"
    return f"{count} transfers go"


def _device_time(lockstep: Lockstep, n: int) -> DeviceTime:
    kinds = collections.defaultdict[str, float](float)
    causes = collections.defaultdict[str, float](float)
    sources = collections.defaultdict[str, float](float)
    for (kind, cause, source), seconds in lockstep.seconds[n].items():
        kinds[kind] += seconds
        sources[source] += seconds
        if cause:
            causes[cause] += seconds
    return DeviceTime(
        device=lockstep.devices[n],
        seconds=lockstep.clock[n],
        compute=kinds["compute"],
        exposed=kinds["stall"] + kinds["collective"],
        memory=kinds["memory"],
        causes=dict(causes),
        sources=dict(sources),
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


def _basis(chip: Chip | Gpu, copies: str) -> str:
    if isinstance(chip, Gpu):
        return (
            f"products at {chip.product_share:.0%} of {chip.flops / 1e12:g} TFLOP/s in bfloat16, "
            f"other work by its bytes in HBM of {chip.hbm_bandwidth / 1e9:g} GB/s at "
            f"{chip.hbm_efficiency:.0%}, {chip.kernel_latency * 1e6:g} us a kernel, NVLink of "
            f"{chip.link_bandwidth / 1e9:g} GB/s and a network of {chip.network_bandwidth / 1e9:g} "
            f"GB/s in each direction at {chip.link_share:.0%}; nothing was run"
        )
    if copies == "cycles":
        estimated = "matmuls and copies"
    else:
        estimated = "matmuls"
    return (
        f"the compiler's cycle estimates of {estimated} at {chip.clock / 1e9:g} GHz, other work by "
        f"its bytes in HBM of {chip.hbm_bandwidth / 1e9:g} GB/s at {chip.hbm_efficiency:.0%}, "
        f"links of {chip.link_bandwidth / 1e9:g} GB/s in each direction; nothing was run"
    )
