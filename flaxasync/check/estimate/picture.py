"""Timelines as a picture: for each device a band for its core, and below it one for each of its
lanes of transfers.

Time is cut into thin slices. In each of them the height of a band is divided among what the lane
does meanwhile. Where iterations of a loop are repeated, the band shows the shares of the iteration
that they repeat. matplotlib and numpy are imported only when a picture is drawn.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from flaxasync.check.estimate.timeline import Slice, Timeline
from flaxasync.check.units import time_text

# The colour of each kind of slice, and its words in the legend.
COLOURS = {
    "compute": ("#3b7dd8", "work"),
    "stall": ("#d64545", "waits for other devices"),
    "collective": ("#e8853d", "held by a collective"),
    "memory": ("#e3c13f", "waits for its memory"),
    "transfer": ("#58a066", "transfer under way"),
    "copy": ("#a9c9b0", "local copy under way"),
    "repeat": ("#dfe5ee", "more iterations"),
}
MAX_DEVICES = 4  # drawn per timeline
# a loop that takes at least this share of the time has a panel for one of its iterations
LONG_LOOP = 0.1
_BINS = 1500  # thin slices of time in a band
_LETTERS = 190  # letters that fit into the width of a band
# inches
_WIDTH = 13.0
_CORE = 0.58
_LANE = 0.2
_AROUND = 0.75
_LEGEND = 0.35
_BASIS = 0.3
_NAMES = 1.3  # the height of the axes of a core, with the names above it, in units of its band


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A period of a timeline, on the bands of some of its devices."""

    title: str
    timeline: Timeline
    begin: float
    end: float
    bands: dict[tuple[int, str], list[Slice]]  # by (device, lane)
    heights: list[float]  # of the bands, in inches


def draw_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    phase_of: Callable[[str], str] | None = None,
) -> None:
    """Draws a timeline as a PNG: the whole of it, and one iteration of each of its two longest
    loops.

    The folder of the file is made if it does not exist. `phase_of` returns what to write above the
    work of an instruction, "" for nothing; by default it is its own name. ImportError says that
    matplotlib is not installed.
    """
    name_of = phase_of or str
    least = LONG_LOOP * timeline.seconds
    loops = [
        loop
        for loop in timeline.loops
        if loop.depth == 0 and loop.trips > 1 and loop.end - loop.start > least
    ]
    longest = sorted(loops, key=lambda loop: loop.start - loop.end)[:2]
    panels = [_panel(_title(timeline, timeline.name), timeline, 0.0, timeline.seconds)]
    for loop in sorted(longest, key=lambda loop: loop.start):
        begin, end = loop.iteration
        title = (
            f"one of {loop.trips} iterations, {time_text(end - begin)}: "
            f"{name_of(loop.name) or loop.name}"
        )
        panels.append(_panel(title, timeline, begin, end, devices=1))
    _draw(panels, path, name_of)


def draw_timelines(
    timelines: Sequence[Timeline], path: str | os.PathLike[str], *, titles: Sequence[str] = ()
) -> None:
    """Draws several timelines as a PNG, below one another, on one scale of time. The default title
    is the program.
    """
    end = max(t.seconds for t in timelines)
    named = [*titles, *(t.name for t in timelines[len(titles) :])]
    _draw(
        [_panel(_title(t, name), t, 0.0, end) for t, name in zip(timelines, named, strict=True)],
        path,
        str,
    )


def _title(t: Timeline, name: str) -> str:
    return (
        f"{name}:  {time_text(t.seconds)},  work {time_text(t.compute)},  exposed "
        f"{time_text(t.exposed)}"
    )


def _panel(
    title: str, timeline: Timeline, begin: float, end: float, *, devices: int = MAX_DEVICES
) -> _Panel:
    """Returns a panel, with the lanes of each device in the order core, links, memory."""
    found: dict[tuple[int, str], list[Slice]] = {
        (d.device, "core"): [] for d in timeline.devices[:devices]
    }
    for s in timeline.slices:
        if s.start < end and s.end > begin and (s.device, "core") in found:
            found.setdefault((s.device, s.lane), []).append(s)
    order = sorted(found, key=lambda at: (at[0], at[1] != "core", at[1] == "memory", at[1]))
    heights = [_CORE if lane == "core" else _LANE for _, lane in order]
    end = max(end, begin + 1e-9)  # a program that takes no time has a width, too
    return _Panel(title, timeline, begin, end, {at: found[at] for at in order}, heights)


def _draw(
    panels: Sequence[_Panel], path: str | os.PathLike[str], name_of: Callable[[str], str]
) -> None:
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "drawing a timeline needs matplotlib: install it, or use save_trace and open it in "
            "Perfetto"
        ) from error
    inches = _LEGEND + _BASIS + sum(_AROUND + sum(panel.heights) for panel in panels)
    with rc_context({"font.family": "DejaVu Sans", "font.size": 8}):
        figure = Figure(figsize=(_WIDTH, inches), dpi=130)
        FigureCanvasAgg(figure)
        drawn: set[str] = set()
        top = inches - _LEGEND
        for panel in panels:
            bottom = top - _AROUND - sum(panel.heights)
            grid = figure.add_gridspec(
                len(panel.bands),
                1,
                height_ratios=panel.heights,
                hspace=0.12,
                left=0.1,
                right=0.985,
                top=(top - 0.35) / inches,
                bottom=(bottom + 0.4) / inches,
            )
            drawn |= _draw_panel(
                [figure.add_subplot(grid[n]) for n in range(len(panel.bands))], panel, name_of
            )
            top = bottom
        patches = [
            Patch(color=colour, label=label)
            for kind, (colour, label) in COLOURS.items()
            if kind in drawn
        ]
        figure.legend(handles=patches, loc="upper right", ncols=len(patches), frameon=False)
        figure.text(0.012, 0.1 / inches, panels[0].timeline.basis, color="#666666", fontsize=7)
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _draw_panel(
    axes_of_bands: Sequence[Any], panel: _Panel, name_of: Callable[[str], str]
) -> set[str]:
    """Draws a panel on one pair of axes for each band. Returns the kinds of slices in it."""
    drawn: set[str] = set()
    last = axes_of_bands[-1]
    width = (panel.end - panel.begin) * 1e3
    edges = [n * width / _BINS for n in range(_BINS + 1)]
    for axes, ((device, lane), slices) in zip(axes_of_bands, panel.bands.items(), strict=True):
        shares = _shares(slices, panel)
        drawn.update(shares)
        if shares:  # a core that does nothing has none
            colours = [COLOURS[kind][0] for kind in shares]
            axes.stackplot(edges, *shares.values(), colors=colours, step="post", linewidth=0)
        axes.set(xlim=(0, width), ylim=(0, _NAMES if lane == "core" else 1), yticks=[])
        label = lane
        if len(panel.timeline.devices) > 1:
            label = f"{lane}, device {device}"
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
        axes.tick_params(axis="x", bottom=axes is last, labelbottom=axes is last)
        axes.spines[:].set_visible(False)
        if lane == "core":
            _name_work(axes, slices, panel, name_of)
    axes_of_bands[0].set_title(panel.title, loc="left", fontweight="bold", fontsize=9, pad=4)
    last.set_xlabel("ms")
    return drawn


def _name_work(
    axes: Any, slices: Sequence[Slice], panel: _Panel, name_of: Callable[[str], str]
) -> None:
    """Writes above the core what it works on, where that takes long enough for a name."""
    # the name, the begin and the end of consecutive slices of one name
    runs: list[tuple[str, float, float]] = []
    for s in slices:
        if s.kind in ("compute", "collective", "repeat"):
            name = name_of(s.name)
            start = s.start
            if runs and runs[-1][0] == name:
                start = runs.pop()[1]
            runs.append((name, start, s.end))
    for name, start, end in runs:
        letters = int((end - start) / (panel.end - panel.begin) * _LETTERS)
        if letters > 3:
            text = name if len(name) <= letters else name[: letters - 1] + "…"
            axes.text(
                (max(start, panel.begin) - panel.begin) * 1e3, 1.04, text, fontsize=6.5, va="bottom"
            )


def _shares(slices: Sequence[Slice], panel: _Panel) -> dict[str, Any]:
    """Returns the share of each kind of slice in each thin slice of time, and once more in the last
    one.
    """
    import numpy as np

    shares: dict[str, Any] = {}
    scale = _BINS / (panel.end - panel.begin)
    for s in slices:
        first = max(0.0, (s.start - panel.begin) * scale)
        last = min(float(_BINS), (s.end - panel.begin) * scale)
        low = int(first)
        high = min(int(last), _BINS - 1)
        for kind, weight in _kinds(s, panel.timeline).items():
            bins = shares.setdefault(kind, np.zeros(_BINS + 1))
            bins[low : high + 1] += weight
            bins[low] -= (first - low) * weight
            bins[high] -= (high + 1 - last) * weight
    for bins in shares.values():
        bins[_BINS] = bins[_BINS - 1]
    return {kind: shares[kind] for kind in COLOURS if kind in shares}


def _kinds(s: Slice, t: Timeline) -> dict[str, float]:
    """Returns what a slice is, by kind: of repeated iterations, the shares of the iteration that
    they repeat.
    """
    loops = [
        loop
        for loop in t.loops
        if s.kind == "repeat" and loop.start <= s.start and s.end <= loop.end
    ]
    if not loops:
        return {s.kind: 1.0}
    # of the innermost loop, because loops are listed in the order in which they ended
    begin, end = loops[0].iteration
    sums: dict[str, float] = {}
    for one in t.slices:
        if (one.device, one.lane) == (s.device, s.lane) and one.start < end and one.end > begin:
            sums[one.kind] = sums.get(one.kind, 0.0) + min(one.end, end) - max(one.start, begin)
    return {kind: seconds / (end - begin) for kind, seconds in sums.items()}
