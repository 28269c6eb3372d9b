"""Writes one HTML page about a run, or about several side by side: `python train/report.py WORKDIR
...`.

The page is one file that has its data, its style and its program in it and loads nothing, so it can
be sent to others.
"""

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# `models`, `configs` and `train` are beside the folder of this script, installed or not
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flaxasync import check
from flaxasync.hardware import chip_of_device
from train.lifecycle.errors import BAD_INPUT, COMPLETE
from train.metrics.lines import Line, read_events, read_metrics
from train.metrics.output import write_atomically

TEMPLATE = Path(__file__).with_name("report_page.html")
MARK = "/*DATA*/null"  # what the template has in place of the data
# of a curve; of more points, the lowest and the highest of each stretch are kept
MOST_POINTS = 2000
_FIRST = (
    "loss",
    "validation_loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "mfu",
    "step_seconds",
)
# The metrics of which the page shows the last value, or the median, and the format of that number.
_LAST = {"loss": ",.4f", "validation_loss": ",.4f", "tokens": ",", "goodput": ".1%"}
_MEDIAN = {"tokens_per_second": ",.0f", "step_seconds": ".4g", "mfu": ".1%"}


def main(arguments: Sequence[str]) -> int:
    """Writes the page and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="train/report.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "workdirs", nargs="+", type=Path, metavar="WORKDIR", help="the workdir of a run"
    )
    parser.add_argument(
        "--out", type=Path, help="the page; by default report.html in the first workdir"
    )
    options = parser.parse_args(arguments)
    for workdir in options.workdirs:
        if not (workdir / "metrics.jsonl").is_file():
            print(
                f"error: WORKDIR must be the folder of a run: there is no {workdir}/metrics.jsonl",
                file=sys.stderr,
            )
            return BAD_INPUT
    page = options.out or options.workdirs[0] / "report.html"
    write_atomically(page, render([read_run(workdir) for workdir in options.workdirs]))
    print(page)
    return COMPLETE


def render(runs: list[Line]) -> str:
    """Returns the page of some runs, as `read_run` describes them."""
    # must not end the script that it is in
    data = json.dumps(runs, allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text().replace(MARK, data)


def read_run(workdir: Path) -> Line:
    """Reads everything that the page shows of a run, as JSON data."""
    lines = read_metrics(workdir / "metrics.jsonl")
    events = read_events(workdir / "events.jsonl")
    # the page shows "Infinity" as text
    config = json.loads(_read(workdir / "config.json") or "{}", parse_constant=str)
    names = dict.fromkeys(name for line in lines for name in line if name not in ("step", "tokens"))
    audit, timeline = _read_program(workdir / "program.txt.gz", events)
    return {
        "name": workdir.resolve().name,
        "figures": _figures(lines, events, config),
        "series": {
            name: _thin(
                [[line["step"], line[name]] for line in lines if line.get(name) is not None]
            )
            for name in sorted(
                names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)
            )
        },
        "events": [event for event in events if event["event"] != "checkpoint"],
        "checkpoints": [event["step"] for event in events if event["event"] == "checkpoint"],
        "config": config,
        "memory": _newest(events, "memory_bytes", {}),
        "audit": audit,
        "timeline": timeline,
        "sample": _read(workdir / "sample.txt"),
    }


def _figures(lines: list[Line], events: list[Line], config: Line) -> dict[str, str]:
    """Returns the figures at the top of the page, by their names."""
    kinds = [event["event"] for event in events]
    times = [event["unix"] for event in events if "unix" in event]
    figures = {"steps": f"{lines[-1]['step'] if lines else 0:,} of {config.get('steps', 0):,}"}
    for name, form in (_LAST | _MEDIAN).items():
        values = [line[name] for line in lines if line.get(name) is not None]
        if values and name in _LAST:
            figures[name.replace("_", " ")] = format(values[-1], form)
        elif values:
            figures[f"{name.replace('_', ' ')} (median)"] = format(statistics.median(values), form)
    for label, event in (
        ("starts", "start"),
        ("skipped updates", "skipped"),
        ("storage errors", "storage_error"),
    ):
        figures[label] = str(kinds.count(event))
    if times:
        figures["wall time"] = f"{(max(times) - min(times)) / 60:.1f} min"
    figures["state"] = "complete" if kinds[-1:] == ["complete"] else "not complete"
    return figures


def _thin(points: list[list[float]]) -> list[list[float]]:
    """Keeps the lowest and the highest point of each stretch, so that no spike disappears."""
    if len(points) <= MOST_POINTS:
        return points
    stretch = -(-2 * len(points) // MOST_POINTS)
    kept = []
    for start in range(0, len(points), stretch):
        ranked = sorted(points[start : start + stretch], key=lambda point: point[1])
        kept += sorted([ranked[0], ranked[-1]])
    return kept


def _read_program(path: Path, events: list[Line]) -> tuple[str, str]:
    """Returns the audit and the timeline of the compiled step as text, or why there is none."""
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, ValueError):
        return "there is no compiled program in this workdir", ""
    kind = _newest(events, "devices", [0, "unknown devices"])[1]
    chip = chip_of_device(kind)
    if chip is None:
        return f"the step was compiled for {kind}, whose transfers are not asynchronous", ""
    try:
        return str(check.audit(text)), str(check.timeline(text, chip.name))
    except ValueError as error:  # HloError is one
        return f"the compiled program cannot be audited: {error}", ""


def _newest(events: list[Line], fact: str, default: object) -> Any:
    """Returns a fact of the newest event that has it."""
    return [default, *(event[fact] for event in events if fact in event)][-1]


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
