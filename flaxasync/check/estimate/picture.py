"""Timelines as a picture: one band for the core of each device, and below it one for each lane of transfers.

matplotlib is imported only when a picture is drawn.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from flaxasync.check.estimate.timeline import Slice, Timeline

COLOURS = {
    "compute": "#3b7dd8",
    "stall": "#d64545",
    "collective": "#e8853d",
    "memory": "#e3c13f",
    "transfer": "#58a066",
    "copy": "#a9c9b0",
    "repeat": "#dfe5ee",
}
LABELS = {
    "compute": "work",
    "stall": "waits for other devices",
    "collective": "held by a collective",
    "memory": "waits for its memory",
    "transfer": "transfer under way",
    "copy": "local copy under way",
    "repeat": "more iterations",
}
MAX_DEVICES = 4  # drawn per timeline
_MARGIN = 1.3  # inches above and below the bands
_UNIT = 0.42  # inches of a unit of a band's height


def draw_timelines(timelines: Sequence[Timeline], path: Any, *, titles: Sequence[str] = ()) -> None:
    """Draws timelines as a PNG, below one another, on one axis of time.

    Args:
      timelines: At least one.
      path: The file.
      titles: A title for each timeline; the name of its program by default.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "drawing a timeline needs matplotlib: install it, or use save_trace and open it in Perfetto"
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows: list[tuple[str, list[Slice], Timeline, bool]] = []  # label, slices, timeline, whether it begins a timeline
    for t in timelines:
        first = True
        for device in t.devices[:MAX_DEVICES]:
            mine = [s for s in t.slices if s.device == device.device]
            for lane in _lanes(mine):
                label = lane + (f", device {device.device}" if len(t.devices) > 1 else "")
                rows.append((label, [s for s in mine if s.lane == lane], t, first))
                first = False
    heights = [1.0 if slices and slices[0].lane == "core" else 0.5 for _, slices, _, _ in rows]
    gaps = [0.9 if first else 0.12 for _, _, _, first in rows]
    inches = _MARGIN + _UNIT * (sum(heights) + sum(gaps))
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        figure = Figure(figsize=(12, inches), dpi=140)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.115, 0.72 / inches, 0.865, 1 - 1.5 / inches))
        end = max(t.seconds for t in timelines) * 1e3
        top, ticks, drawn = 0.0, [], set()
        number = 0
        for (label, slices, t, first), height, gap in zip(rows, heights, gaps, strict=True):
            top += gap
            if first:
                title = titles[number] if number < len(titles) else t.name
                number += 1
                text = (
                    f"{title}:  {t.seconds * 1e3:.2f} ms,  work {t.compute * 1e3:.2f},  exposed {t.exposed * 1e3:.2f}"
                )
                axes.text(0, top - 0.16, text, fontweight="bold", va="bottom", ha="left")
                if t.seconds * 1e3 < end * 0.999:
                    axes.plot([t.seconds * 1e3] * 2, [top, top + height], color="#333333", lw=1, ls=":")
            _draw_band(axes, slices, top, height, end)
            drawn |= {s.kind for s in slices}
            ticks.append((top + height / 2, label))
            top += height
        axes.set_xlim(0, end * 1.005)
        axes.set_ylim(top + 0.15, 0)
        axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
        axes.set_xlabel("ms")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e6e6e6", lw=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        patches = [matplotlib.patches.Patch(color=COLOURS[k], label=LABELS[k]) for k in COLOURS if k in drawn]
        figure.legend(
            handles=patches, loc="upper right", ncols=len(patches), frameon=False, bbox_to_anchor=(0.985, 1.0)
        )
        basis = f"estimate for {timelines[0].chip}: {timelines[0].basis}"
        figure.text(0.012, 0.012, basis, color="#666666", fontsize=7)
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _lanes(slices: list[Slice]) -> list[str]:
    """Returns the lanes of a device: the core first, then the links, then the memory."""
    lanes = list(dict.fromkeys(s.lane for s in slices))
    return sorted(lanes, key=lambda lane: (lane != "core", lane == "memory", lane))


def _draw_band(axes: Any, slices: list[Slice], top: float, height: float, end: float) -> None:
    """Draws the slices of one lane, and names those that are wide enough for a name."""
    for kind, colour in COLOURS.items():
        chosen = [s for s in slices if s.kind == kind]
        if not chosen:
            continue
        bars = [(s.start * 1e3, s.seconds * 1e3) for s in chosen]
        axes.broken_barh(bars, (top, height), facecolors=colour, edgecolors="white", linewidth=0.4)
        for s in chosen:
            width = s.seconds * 1e3 / end
            if height >= 1 and width > 0.05:
                text = s.name if len(s.name) < 110 * width else s.name[: max(0, int(110 * width) - 1)] + "…"
                dark = kind in ("repeat", "memory", "copy")
                axes.text(
                    (s.start + s.end) / 2 * 1e3, top + height / 2, text, ha="center", va="center", fontsize=7,
                    color="#333333" if dark else "white", clip_on=True,
                )  # fmt: skip
