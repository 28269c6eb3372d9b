"""Reads a profile of `jax.profiler`, and says how much communication was exposed, beside the estimate of the program.

    python -m flaxasync.check trace PATH [--program HLO] [--module NAME] [--chip v5e] [--json]

The exit status is 0, or 2 if the profile or the program cannot be read.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence

from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.hlo.load import read_module
from flaxasync.check.trace.exposed import DeviceTimes, Exposed, measure_exposed
from flaxasync.check.trace.profile import read_profile
from flaxasync.hardware import CHIPS

SHOWN = 12  # instructions and layers in the table


def main(arguments: list[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m flaxasync.check trace", description=description)
    parser.add_argument("path", help="an xplane file, or a folder that jax.profiler.trace wrote")
    parser.add_argument("--program", metavar="HLO", help="the program: the text that compiled.as_text() returned")
    parser.add_argument("--module", metavar="NAME", help="its name in the profile (default: the one that took longest)")
    parser.add_argument("--chip", choices=sorted(CHIPS), help="the chip that the program is estimated for")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    try:
        module = read_module(chosen.program) if chosen.program else None
        times = measure_exposed(read_profile(chosen.path), chosen.module, module)
        estimate = timeline(module, chosen.chip) if module is not None and chosen.chip else None
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps([dataclasses.asdict(device) for device in times], indent=1))
    else:
        print(_tables(times, estimate))
    return 0


def _tables(times: Sequence[DeviceTimes], estimate: Timeline | None) -> str:
    """Makes tables of devices, and of the instructions and layers of the device with the most exposed communication."""
    worst = max(times, key=lambda device: device.exposed)
    lines = [
        f"{worst.program}, {worst.runs} runs; milliseconds of one run",
        f"{'device':20} {'run':>10} {'compute':>10} {'communication':>14} {'exposed':>10}",
    ]
    for d in times:
        share = f"  {d.exposed / d.seconds:6.1%}" if d.seconds else ""
        lines.append(
            f"{d.device:20} {_ms(d.seconds)} {_ms(d.compute)} {_ms(d.communication):>14} {_ms(d.exposed)}{share}"
        )
    causes: Mapping[str, float] = {}
    if estimate is not None:
        e, causes = estimate.slowest, estimate.slowest.causes
        lines.append(f"{'estimated':20} {_ms(e.seconds)} {_ms(e.compute)} {'':14} {_ms(e.exposed)}")
        lines.append(f"the estimate is based on {estimate.basis}")
    lines += _table(f"instructions that communicate on {worst.device}", worst.ops, causes)
    if any(layer.name for layer in worst.layers):
        lines += _table("layers", worst.layers, {})
    return "\n".join(lines)


def _table(title: str, rows: Sequence[Exposed], estimates: Mapping[str, float]) -> list[str]:
    lines = [
        "",
        f"{title:50} {'times':>7} {'busy':>10} {'exposed':>10} {'estimated' if estimates else '':>10}".rstrip(),
    ]
    for row in rows[:SHOWN]:
        name, estimate = row.name or "(no layer)", _ms(estimates[row.name]) if row.name in estimates else ""
        lines.append(f"  {name[:48]:48} {row.count:7.0f} {_ms(row.busy)} {_ms(row.seconds)} {estimate}".rstrip())
    if rest := rows[SHOWN:]:
        lines.append(f"  {f'and {len(rest)} more':48} {'':18} {_ms(sum(row.seconds for row in rest))}")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:10.3f}"
