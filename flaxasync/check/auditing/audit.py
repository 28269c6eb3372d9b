"""`audit`: whether the transfers of a compiled program overlap with work, whether they are safe,
and what to do.

For every asynchronous operation the audit reports its bytes, the work that runs inside its window,
and what stays exposed (overlap.py). Then it reports what is wrong, each finding with a code and a
remedy (findings.py). Times are estimates from the text. Hazards (hazards.py) and broken rules
(async_rules.py) are facts of the text.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flaxasync.check.auditing import overlap
from flaxasync.check.auditing.async_rules import check_async_rules
from flaxasync.check.auditing.findings import CODES, Audit, Finding, Ring, finding
from flaxasync.check.auditing.gpu_products import held_up_products
from flaxasync.check.auditing.hazards import kernel_hazards
from flaxasync.check.auditing.independent_work import IndependentWork
from flaxasync.check.auditing.rings import rings_of
from flaxasync.check.auditing.wide_transfers import wide_transfers
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.estimate.costs_of import costs_of
from flaxasync.check.estimate.estimator import limits
from flaxasync.check.hlo.async_operations import KERNEL, AsyncOperation, async_operations
from flaxasync.check.hlo.gpu_calls import is_for_gpus
from flaxasync.check.hlo.load import axes_of, chip_of, module_of
from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.participants import AxisNames
from flaxasync.check.hlo.shapes import SEMAPHORE, SMEM, VMEM
from flaxasync.hardware import Chip

# the chips whose times are estimated if neither the caller nor the program names one
DEFAULT_CHIP = "v5e"
DEFAULT_GPU = "h100"


def audit(
    compiled: Any,
    *,
    chip: str | None = None,
    expect: Mapping[str, int] | None = None,
    kernels: Mapping[str, float] | None = None,
) -> Audit:
    """Audits a compiled program.

    Args:
      compiled: What `jitted.lower(...).compile()` or `compile_for` returned, or HLO text, or a
        parsed module.
      chip: The chip whose times are estimated, or one of its topologies: "v5e", "v5p:2x2x2",
        "h100:8". By default the program's own chip. If the program does not say, v5e, or h100 for
        a program that was compiled for GPUs.
      expect: How many asynchronous operations the program must have at least, by a part of their
        name or by their kind: {"permute_start": 3}.
      kernels: Seconds of Pallas kernels, by name. The time of any other kernel is that of its own
        cost estimate.

    Returns:
      The audit: `.ok`, `.findings`, `.pairs`. `print` shows a table.

    Raises:
      HloError: The text cannot be read.
      ValueError: The chip is unknown, or the program has no text on this platform.
    """
    module = module_of(compiled)
    named = chip or chip_of(compiled)
    costs = costs_of(module, named or default_chip(module), program=compiled, kernels=kernels)
    names = AxisNames(module, axes_of(compiled))
    in_text = async_operations(module)
    operations = [op for op in in_text if op.computation in costs.runs]  # those that run
    windows = overlap.Windows(costs)
    pairs = tuple(overlap.pair_of(windows, op) for op in operations)
    hiding = {(w.computation, w.instruction) for p in pairs if p.communicates for w in p.work}
    independent = IndependentWork(costs)
    holding = overlap.collectives_that_hold_the_chip(costs)
    # findings of one run of their computation
    found = [*check_async_rules(module, in_text), *kernel_hazards(operations)]
    found += _unfinished_kernels(operations)
    found += _missing(module, operations, expect or {})
    found += overlap.synchronous_collectives(independent, holding, names)
    copied_in_flight = {
        (f.computation, f.instruction) for f in found if f.code == "in-flight-copied"
    }
    found += overlap.loop_copies(costs, known=copied_in_flight)
    of_program: list[Finding] = []  # findings of one run of the program
    rings: tuple[Ring, ...] = ()
    if module.is_scheduled:
        for op, pair in zip(operations, pairs, strict=True):
            found += overlap.overlap_findings(independent, op, pair, hiding, names)
        found += held_up_products(costs, zip(operations, pairs, strict=True), holding)
        of_program += wide_transfers(costs, pairs, holding)
        synchronous = [(collective, costs.runs[i.computation.name]) for i, collective in holding]
        rings = rings_of(pairs, synchronous)
    else:
        message = f"{module.name or 'the text'} is not scheduled"
        found.append(finding("not-scheduled", message, module.entry))
    for f in found:
        runs = costs.runs.get(f.computation, 1)
        of_program.append(dataclasses.replace(f, count=runs, gain=runs * f.gain))
    of_program.sort(key=lambda f: (-f.severity, -f.gain, list(CODES).index(f.code)))
    return Audit(
        module.name,
        costs.chip.name,
        pairs,
        tuple(of_program),
        _notes(module, costs, named is None),
        rings,
    )


def default_chip(module: HloModule) -> str:
    """Returns the chip that is assumed for a program that names none."""
    if is_for_gpus(module):
        return DEFAULT_GPU
    return DEFAULT_CHIP


def _notes(module: HloModule, costs: Costs, chip_was_assumed: bool) -> tuple[str, ...]:
    notes = []
    if chip_was_assumed:
        notes.append(
            f"times are those of a {costs.chip.name}, because the text does not name its chip: say "
            "chip=..."
        )
    instructions = module.instructions
    has_estimates = isinstance(costs.chip, Chip)  # of a TPU's program the compiler writes some
    if has_estimates and not any(
        "estimated_cycles" in i.attributes.get("backend_config", "") for i in instructions
    ):
        if not any(_is_for_tpu(i) for i in instructions):
            notes.append(
                "the text has no cycle estimates (it is no TPU program): work is timed by its "
                "bytes only"
            )
        # kernels have estimates of their own
        elif any(
            costs.explained(i).source == "bytes"
            for i in costs.executed
            if i.custom_call_target != KERNEL
        ):
            notes.append(
                "the text has no cycle estimates: work beside kernels is timed by its bytes only"
            )
    return (*notes, *limits(module, costs.chip.name))


def _is_for_tpu(i: Instruction) -> bool:
    """Says whether an instruction has what only the compiler for TPUs writes: a kernel, tiles of 8,
    or its notes.
    """
    layouts = [leaf.layout for _, leaf in i.shape.leaves() if leaf.layout is not None]
    is_tiled = any(
        "T(" in layout.tiling or layout.memory_space in (VMEM, SEMAPHORE, SMEM)
        for layout in layouts
    )
    return (
        is_tiled
        or i.custom_call_target == KERNEL
        or '"scoped_memory_configs"' in i.attributes.get("backend_config", "")
    )


def _unfinished_kernels(operations: list[AsyncOperation]) -> list[Finding]:
    """Returns a finding for each start of a kernel pair or of a pair of fusions that has no
    done.
    """
    return [
        finding("async-unfinished", f"no kernel waits for the semaphores of {op.name}", op.start)
        for op in operations
        if op.spelling in ("kernel", "fusion") and not op.windows
    ]


def _missing(
    module: HloModule, operations: list[AsyncOperation], expect: Mapping[str, int]
) -> list[Finding]:
    found = []
    for key, wanted in expect.items():
        have = sum(key in op.name or key == op.kind for op in operations)
        if have < wanted:
            message = f"expected {wanted} of '{key}', the program has {have}"
            found.append(finding("deleted", message, module.entry))
    return found
