"""Files made of results: `save_picture` draws timelines and simulated runs, `save_trace` writes
Chrome traces.
"""

import json
import os
import pathlib
from collections.abc import Sequence

from flaxasync.check.estimate.picture import draw_timeline, draw_timelines
from flaxasync.check.estimate.timeline import Timeline

# The names that the trace viewers have for their colours.
_COLOURS = {
    "compute": "good",
    "stall": "terrible",
    "collective": "bad",
    "memory": "yellow",
    "repeat": "grey",
}


def save_picture(
    results: Timeline | Sequence[Timeline],
    path: str | os.PathLike[str],
    *,
    titles: Sequence[str] = (),
) -> None:
    """Draws results as a PNG: one with its longest loops, or several below one another on one scale
    of time.

    Args:
      results: What `timeline` or `play` returned, or several of them.
      path: The file. Its folder is made if it does not exist.
      titles: A title for each of several results; the name of its program by default.

    Raises:
      ValueError: `results` is empty, or has something else in it.
      ImportError: matplotlib is not installed.
    """
    if isinstance(results, Timeline):
        draw_timeline(results, path)
    elif not results:
        raise ValueError("results must hold what timeline or play returned: got nothing")
    else:
        draw_timelines([_checked(result) for result in results], path, titles=titles)


def save_trace(result: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes a Chrome trace, the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    It has one process for each device, one thread for each lane, and times in microseconds. Its
    metadata says what the times are based on. The folder of the file is made if it does not exist.
    """
    t = _checked(result)
    lanes: dict[tuple[int, str], int] = {}
    for s in t.slices:
        lanes.setdefault((s.device, s.lane), len(lanes))
    events: list[dict] = []
    for device in sorted({device for device, _ in lanes}):
        name = {"name": f"device {device} ({t.chip})"}
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": name})
    for (device, lane), thread in lanes.items():
        events.append(
            {"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": lane}}
        )
    for s in t.slices:
        if s.kind in _COLOURS:
            colour = {"cname": _COLOURS[s.kind]}
        else:
            colour = {}
        events.append(
            {
                "ph": "X",
                "name": s.name,
                "cat": s.kind,
                "pid": s.device,
                "tid": lanes[s.device, s.lane],
                "ts": s.start * 1e6,
                "dur": s.seconds * 1e6,
                "args": {"kind": s.kind, "cause": s.cause},
            }
            | colour
        )
    about = {"basis": t.basis, "known_error": t.known_error, "notes": list(t.notes)}
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _checked(result: object) -> Timeline:
    if isinstance(result, Timeline):
        return result
    raise ValueError(
        f"a result must be what timeline or play returned: got {type(result).__name__}"
    )
