"""Simulated runs as a picture: one band for the core of each device, and below it one for the bytes on its links.

In each thin slice of time the height of a core's band is divided into the shares in which a matrix unit multiplies,
other work is issued, and the core waits, by cause. Several runs are drawn side by side on one scale of time, so that
their waits can be compared.

matplotlib and numpy are imported only when a picture is drawn.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from flaxasync.check.player.result import Device, Result

COLOURS = {
    "matrix": ("#1f5fa8", "matrix units multiply"),
    "work": ("#9dc3e6", "other work"),
    "memory": ("#f2c14e", "waits for its own HBM"),
    "remote": ("#d1495b", "waits for another device"),
    "collective": ("#e8853d", "ring model of a collective"),
}
LINK = ("#3c8d5a", "bytes on a link")
# The colour of each cause of a wait.
_CAUSES = {"memory": "memory", "receive": "remote", "send": "remote", "sync": "remote", "collective": "collective"}
MAX_DEVICES = 4  # drawn per run

_BINS = 900  # slices of time in a panel
_BAND, _LINK, _GAP = 1.0, 0.22, 0.34  # heights, in units of a band
_WIDTH, _LEFT, _RIGHT, _BETWEEN = 12.0, 0.85, 0.2, 0.35  # inches of the figure, and beside and between its panels
_TOP, _BOTTOM, _ROW = 0.78, 0.72, 0.62  # inches above and below the panels, and of one unit of a band
_LETTERS = 120  # letters that fit into the width of the figure


def draw_runs(results: Sequence[Result], path: Any, *, titles: Sequence[str] = ()) -> None:
    """Draws simulated runs as a PNG, side by side, on one scale of time.

    Args:
      results: At least one.
      path: The file.
      titles: A title for each result; the name of its program by default.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "drawing a run needs matplotlib: install it, or write a trace and open it in Perfetto"
        ) from error
    end = max(r.seconds for r in results) * 1e3
    rows = max(min(MAX_DEVICES, len(r.devices)) for r in results) * (_BAND + _LINK + _GAP)
    height = _ROW * rows + _TOP + _BOTTOM
    panel = (_WIDTH - _LEFT - _RIGHT - _BETWEEN * (len(results) - 1)) / len(results)
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        figure = Figure(figsize=(_WIDTH, height), dpi=130)
        FigureCanvasAgg(figure)
        for number, result in enumerate(results):
            left = _LEFT + number * (panel + _BETWEEN)
            axes = figure.add_axes(
                (left / _WIDTH, _BOTTOM / height, panel / _WIDTH, 1 - (_TOP + _BOTTOM) / height)
            )  # fmt: skip
            shown = sorted(result.devices, key=lambda d: d.device)[:MAX_DEVICES]
            title = titles[number] if number < len(titles) else result.name
            _draw_run(axes, result, shown, title, end, letters=_LETTERS * panel / _WIDTH)
            axes.set_ylim(rows, -_GAP)
            if number:  # the devices are named in the first panel only
                axes.set_yticks([])
        present = {c for r in results for d in r.devices for c in d.waits}
        used = [k for k in COLOURS if k in ("matrix", "work") or any(_CAUSES[c] == k for c in present)]
        patches = [Patch(color=COLOURS[k][0], label=COLOURS[k][1]) for k in used]
        patches.append(Patch(color=LINK[0], label=LINK[1]))
        figure.legend(
            handles=patches, loc="upper center", ncols=len(patches), frameon=False, bbox_to_anchor=(0.5, 1.005)
        )
        figure.text(0.012, 0.12 / height, results[0].basis, color="#666666", fontsize=7)
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _draw_run(axes: Any, result: Result, shown: Sequence[Device], title: str, end: float, *, letters: float) -> None:
    """Draws one run, from 0 to `end` ms. `letters` is the number of letters that fit into its width."""
    import numpy as np

    times, top, ticks = np.linspace(0, end, _BINS + 1), 0.0, []
    for device in shown:
        shares, links = _shares(result, device.device, end, np)
        base = np.zeros(_BINS)
        for kind, (colour, _) in COLOURS.items():
            low, high = top + _BAND * (1 - base), top + _BAND * (1 - base - shares[kind])
            axes.fill_between(times, _step(low), _step(high), step="post", color=colour, lw=0)
            base = base + shares[kind]
        axes.broken_barh(links, (top + _BAND + 0.05, _LINK - 0.05), facecolors=LINK[0])
        _name_phases(axes, device, top, end, letters)
        ticks.append((top + _BAND / 2, f"device {device.device}\n({','.join(map(str, device.coords[:2]))})"))
        top += _BAND + _LINK + _GAP
    took = result.seconds * 1e3
    if took < 0.9 * end:
        axes.plot([took, took], [0, top - _GAP], color="#333333", lw=1, ls=(0, (4, 3)))
        axes.text(took + 0.015 * end, top / 2, f"done {end - took:.2f} ms\nearlier", va="center", color="#333333")
    words = f"{took:.2f} ms,  {result.share_of_peak:.0%} of peak,  {result.exposed * 1e3:.2f} ms waiting for others"
    above = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(title, xytext=(0, 15), fontweight="bold", fontsize=10, **above)
    axes.annotate(words, xytext=(0, 2), **above)
    axes.set_xlim(0, end * 1.002)
    axes.set_yticks([y for y, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _shares(result: Result, device: int, end: float, np: Any) -> tuple[dict, list[tuple[float, float]]]:
    """Returns the share of each kind in each bin, and the stretches of time in which links carry the device's bytes."""
    shares = {kind: np.zeros(_BINS) for kind in COLOURS}
    links = []
    scale = 1e3 / result.clock / end * _BINS
    for s in result.stretches:
        if s.device != device:
            continue
        if s.lane != "core":
            if s.kind == "transfer":
                links.append((s.start * 1e3 / result.clock, (s.end - s.start) * 1e3 / result.clock))
            continue
        first, last = s.start * scale, s.end * scale
        if s.kind == "run":
            multiplying = min(1.0, s.busy / (s.end - s.start))
            _add(shares["matrix"], first, last, multiplying, np)
            _add(shares["work"], first, last, 1 - multiplying, np)
        else:
            _add(shares[_CAUSES[s.cause]], first, last, 1.0, np)
    return shares, links


def _add(bins: Any, first: float, last: float, weight: float, np: Any) -> None:
    """Adds a stretch of time to the bins that it overlaps, by the share of each bin that it fills."""
    low, high = int(first), min(int(last), len(bins) - 1)
    if low >= len(bins):
        return
    if low == high:
        bins[low] += (last - first) * weight
        return
    bins[low] += (low + 1 - first) * weight
    bins[low + 1 : high] += weight
    bins[high] += min(last - high, 1.0) * weight


def _step(values: Any) -> Any:
    """Repeats the last value, because a plot with steps needs one value for each edge of the bins."""
    import numpy as np

    return np.append(values, values[-1])


def _name_phases(axes: Any, device: Device, top: float, end: float, letters: float) -> None:
    """Writes the names of the phases above a band, if they fit."""
    for phase in device.phases:
        start, seconds = phase.start * 1e3, phase.seconds * 1e3
        if phase.depth == 0 and phase.runs == 1:
            if start > 0:
                axes.plot([start, start], [top - 0.02, top + _BAND + 0.02], color="white", lw=1.2)
            width = int(seconds / end * letters)
            if width > 3:
                text = phase.name if len(phase.name) <= width else phase.name[: width - 1] + "…"
                axes.text(start + 0.004 * end, top - 0.03, text, fontsize=7, color="#333333", va="bottom")
