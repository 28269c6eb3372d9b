"""A timeline as a Chrome trace: the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import json
import pathlib
from typing import Any

from flaxasync.check.estimate.timeline import Timeline

# The names that the trace viewers have for their colours.
_COLOURS = {"compute": "good", "stall": "terrible", "collective": "bad", "memory": "yellow", "repeat": "grey"}


def write_trace(timeline: Timeline, path: Any) -> None:
    """Writes the trace. Its metadata says what the times are based on."""
    about = {"basis": timeline.basis, "known_error": timeline.known_error, "notes": list(timeline.notes)}
    text = json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms", "otherData": about})
    pathlib.Path(path).write_text(text)


def trace_events(timeline: Timeline) -> list[dict]:
    """Returns the events: one process for each device, one thread for each lane, times in microseconds."""
    lanes: dict[tuple[int, str], int] = {}
    for s in timeline.slices:
        lanes.setdefault((s.device, s.lane), len(lanes))
    events: list[dict] = []
    for device in sorted({device for device, _ in lanes}):
        name = {"name": f"device {device} ({timeline.chip})"}
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": name})
    for (device, lane), thread in lanes.items():
        events.append({"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": lane}})
    for s in timeline.slices:
        event = {
            "ph": "X", "name": s.name, "cat": s.kind, "pid": s.device, "tid": lanes[s.device, s.lane],
            "ts": s.start * 1e6, "dur": s.seconds * 1e6, "args": {"kind": s.kind, "cause": s.cause},
        }  # fmt: skip
        if s.kind in _COLOURS:
            event["cname"] = _COLOURS[s.kind]
        events.append(event)
    return events
