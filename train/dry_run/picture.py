"""The picture of a dry run: the memory of a device, the whole step, and one layer in each direction in detail."""

from pathlib import Path
from typing import Any

from flaxasync.check import Loop, Slice, Timeline
from train.dry_run.report import GIB, DryRun, gib, time_text
from train.dry_run.step_phases import Phases

COLOURS = {
    "matmul": "#2f66b3",
    "work": "#9fc1ec",
    "stall": "#d64545",
    "collective": "#e8853d",
    "memory": "#e3c13f",
    "transfer": "#58a066",
    "copy": "#b9d3bf",
    "repeat": "#dfe5ee",
}
LABELS = {
    "matmul": "matmuls, kernels",
    "work": "other work",
    "stall": "waits for other devices",
    "collective": "synchronous collective",
    "memory": "waits for its own memory",
    "transfer": "transfer in flight",
    "copy": "local copy in flight",
    "repeat": "further iterations of a loop",
}
MEMORY_COLOURS = ("#34495e", "#5d7ea3", "#7fb3a4", "#c9c9c9", "#8c6bb1")
MIN_LOOP = 0.02  # a loop that takes at least this share of the step is drawn as one block
LETTER = 0.0048  # width of a letter, as a share of the width of a panel
SHORT = 0.01  # slices shorter than this share of an iteration do not interrupt the name of an op
INK = "#333333"  # colour of text


def save_picture(report: DryRun, path: Path) -> None:
    """Draws a dry run as a PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    phases, t = Phases(report.program), report.timeline
    zooms = _zooms(t)
    heights = [0.55, 1.15, *(0.9 + 0.3 * len(_lanes(t, loop)) for loop in zooms)]
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(13.5, 2.4 + 1.25 * sum(heights)), dpi=130)
        FigureCanvasAgg(figure)
        size = figure.get_size_inches()[1]
        grid = figure.add_gridspec(
            len(heights), 1, height_ratios=heights, hspace=0.95 / (size / len(heights) / 2), left=0.075, right=0.975,
            top=1 - 1.0 / size, bottom=0.85 / size,
        )  # fmt: skip
        drawn: set[str] = set()
        _draw_memory(figure.add_subplot(grid[0]), report)
        _draw_step(figure.add_subplot(grid[1]), t, phases, drawn)
        for n, loop in enumerate(zooms):
            _draw_iteration(figure.add_subplot(grid[2 + n]), t, loop, phases, drawn)
        figure.text(0.012, 1 - 0.3 / size, _title(report), fontsize=13, fontweight="bold", va="center")
        figure.text(0.012, 1 - 0.56 / size, _subtitle(report), fontsize=10, color=INK, va="center")
        patches = [Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in COLOURS if kind in drawn]
        figure.legend(
            handles=patches, loc="lower left", ncols=len(patches), frameon=False, bbox_to_anchor=(0.065, 0.22 / size)
        )
        figure.text(0.012, 0.14 / size, f"Estimates, from {t.basis}.", color="#777777", fontsize=7.5)
        figure.savefig(path)


def _title(report: DryRun) -> str:
    batch = f"batch {report.tried.data.batch_size} x {report.tried.data.sequence_length:,} tokens"
    shape = " x ".join(f"{name} {size}" for name, size in report.mesh.items())
    return f"One training step, {batch}, on {report.topology} ({shape})"


def _subtitle(report: DryRun) -> str:
    text = (
        f"{time_text(report.timeline.seconds)} estimated   ·   {report.tokens_per_second:,.0f} tokens/s   ·   "
        f"MFU {report.mfu:.1%}   ·   {report.exposed_share:.1%} of the time waiting for other devices"
    )
    if not report.fits:
        options = ", ".join(f"{name.partition('.')[2]} {value}" for name, value in report.smaller.items())
        text += f"   ·   the requested step does not fit; drawn with {options}"
    return text


def _draw_memory(axes: Any, report: DryRun) -> None:
    """Draws the memory that the drawn step uses as one bar, and the memory of the chip as a line."""
    available, left = report.chip.hbm_bytes / GIB, 0.0
    end = 1.02 * max(available, report.program.bytes_by_kind["total"] / GIB)
    for colour, (what, count) in zip(MEMORY_COLOURS, report.memory().items(), strict=True):
        width = count / GIB
        axes.barh(0, width, left=left, height=0.62, color=colour, edgecolor="white", linewidth=0.6)
        text = f"{what}  {gib(count)}"
        if width > 0.0085 * len(text) * end:
            axes.text(left + width / 2, 0, text, ha="center", va="center", color="white", fontsize=8)
        elif width > 0.037 * end:
            short = {"parameters": "params"}.get(what, what.split()[0])
            axes.text(left + width / 2, 0, f"{short}\n{gib(count)}", ha="center", va="center", color="white",
                      fontsize=6.5)  # fmt: skip
        left += width
    axes.plot([available, available], [-0.5, 0.5], color="#b03030", lw=1.6)
    used = f"{gib(report.program.bytes_by_kind['total'])} used of {gib(report.chip.hbm_bytes)}"
    axes.set_title(f"Memory of a device (GiB): {used}", loc="left", fontweight="bold")
    if not report.fits:
        axes.set_title(f"requested: {gib(report.needed)}, which does not fit", loc="right", color="#b03030")
    axes.set_xlim(0, end)
    axes.set_ylim(-0.55, 0.55)
    axes.set_yticks([])
    _remove_frame(axes)


def _draw_step(axes: Any, t: Timeline, phases: Phases, drawn: set[str]) -> None:
    """Draws the core over the whole step; a long loop becomes a block that is divided by the share of each kind."""
    scale, unit = _unit(t.seconds)
    device = t.devices[0].device
    blocks = [loop for loop in t.loops if loop.depth == 0 and loop.end - loop.start > MIN_LOOP * t.seconds]
    core = [s for s in t.slices if s.device == device and s.lane == "core"]
    loose = [s for s in core if not any(b.start <= s.start < b.end for b in blocks)]
    _draw_slices(axes, loose, 0, 1, scale, phases, drawn)
    for block in blocks:
        bottom, width = 0.0, (block.end - block.start) * scale
        for kind, share in _shares(core, block, phases):
            axes.barh(bottom + share / 2, width, left=block.start * scale, height=share, color=COLOURS[kind])
            if share > 0.1 and width > 0.12 * t.seconds * scale:
                light = kind in ("work", "memory", "repeat")
                axes.text(
                    (block.start + block.end) / 2 * scale, bottom + share / 2, f"{LABELS[kind]} {share:.0%}",
                    ha="center", va="center", fontsize=7.5, color=INK if light else "white",
                )  # fmt: skip
            bottom += share
            drawn.add(kind)
        axes.barh(0.5, width, left=block.start * scale, height=1, color="none", edgecolor="white", linewidth=1.2)
        if width > 0.06 * t.seconds * scale:
            iteration = time_text(block.iteration[1] - block.iteration[0])
            name = _describe_loop(phases, block)
            text = f"{name}: {block.trips} x {iteration}" if block.trips > 1 else name
            axes.text((block.start + block.end) / 2 * scale, 1.05, text, ha="center", va="bottom", fontsize=8.5)
    axes.set_title(f"The step ({unit}); the height of a colour in a loop is its share of the time", loc="left",
                   fontweight="bold", pad=20)  # fmt: skip
    axes.set_xlim(0, t.seconds * scale)
    axes.set_ylim(0, 1.01)
    axes.set_yticks([])
    _remove_frame(axes)


def _draw_iteration(axes: Any, t: Timeline, loop: Loop, phases: Phases, drawn: set[str]) -> None:
    """Draws one iteration of a loop: what the core does, with the names of ops, and what is in flight on each link."""
    begin, end = loop.iteration
    scale, unit = _unit(end - begin)
    device, lanes = t.devices[0].device, _lanes(t, loop)
    top, ticks = 0.0, []
    for lane in lanes:
        height = 1.0 if lane == "core" else 0.42
        inside = [s for s in t.slices if s.device == device and s.lane == lane and s.end > begin and s.start < end]
        slices = [_clipped(s, begin, end) for s in inside]
        _draw_slices(axes, slices, top, height, scale, phases, drawn)
        if lane == "core":
            _draw_op_names(axes, slices, phases, scale, (end - begin) * scale)
        ticks.append((top + height / 2, {"memory": "own memory"}.get(lane, lane)))
        top += height + 0.1
    title = f"{'One iteration: ' if loop.trips > 1 else ''}{_describe_loop(phases, loop)} ({unit})"
    axes.set_title(title, loc="left", fontweight="bold", pad=30)
    axes.set_xlim(0, (end - begin) * scale)
    axes.set_ylim(top, 0)
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    _remove_frame(axes)


def _draw_op_names(axes: Any, core: list[Slice], phases: Phases, scale: float, width: float) -> None:
    """Writes above the core which op it works on, where that takes long enough for a name."""
    runs: list[list[Any]] = []  # [name of the op, start, end] of consecutive slices of one op
    for s in sorted(core, key=lambda s: s.start):
        part = phases.part(s.cause or s.name)
        if not part and s.seconds * scale > SHORT * width:
            runs.append(["", s.start, s.end])
        elif part and runs and runs[-1][0] == part:
            runs[-1][2] = s.end
        elif part and len(runs) > 1 and runs[-2][0] == part and runs[-1][2] - runs[-1][1] < SHORT * width / scale:
            runs[-2][2] = s.end  # the interruption was short
            del runs[-1]
        elif part:
            runs.append([part, s.start, s.end])
    for part, start, end in runs:
        letters = int((end - start) * scale / (LETTER * width))
        if part and (text := _wrapped(part, letters)):
            axes.plot([start * scale, end * scale], [-0.07, -0.07], color="#888888", lw=1.2, clip_on=False)
            axes.text((start + end) / 2 * scale, -0.12, text, ha="center", va="bottom", fontsize=7.5, color=INK,
                      linespacing=1.1)  # fmt: skip


def _wrapped(name: str, letters: int) -> str:
    """Breaks a name into at most two lines of up to `letters` letters; returns "" if it does not fit."""
    if len(name) <= letters:
        return name
    breaks = [n + 1 for n, letter in enumerate(name) if letter == "_"]
    middle = min(breaks, key=lambda n: abs(2 * n - len(name)), default=0)
    return f"{name[:middle]}\n{name[middle:]}" if middle and max(middle, len(name) - middle) <= letters else ""


def _draw_slices(
    axes: Any, slices: list[Slice], top: float, height: float, scale: float, phases: Phases, drawn: set[str]
) -> None:
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for s in slices:
        by_kind.setdefault(_kind(s, phases), []).append((s.start * scale, s.seconds * scale))
    for kind, bars in by_kind.items():
        axes.broken_barh(bars, (top, height), facecolors=COLOURS[kind], edgecolors="white", linewidth=0.15)
        drawn.add(kind)


def _shares(core: list[Slice], loop: Loop, phases: Phases) -> list[tuple[str, float]]:
    """Returns the kinds of work and waiting in a typical iteration with their shares of its time, which sum to 1."""
    begin, end = loop.iteration
    sums = dict.fromkeys(COLOURS, 0.0)
    for s in core:
        if s.end > begin and s.start < end and s.kind != "repeat":
            clipped = _clipped(s, begin, end)
            sums[_kind(s, phases)] += clipped.seconds
    total = sum(sums.values()) or 1.0
    return [(kind, seconds / total) for kind, seconds in sums.items() if seconds > 0]


def _kind(s: Slice, phases: Phases) -> str:
    if s.kind == "compute":
        return "matmul" if phases.multiplies(s.name) else "work"
    return s.kind


def _clipped(s: Slice, begin: float, end: float) -> Slice:
    """Returns the part of a slice that lies in an interval, in seconds from the start of the interval."""
    return Slice(s.device, s.lane, s.name, s.kind, max(s.start, begin) - begin, min(s.end, end) - begin, s.cause)


def _zooms(t: Timeline) -> list[Loop]:
    """Returns the two longest loops of the step in order of time, or the whole step if it has no long loop."""
    loops = [loop for loop in t.loops if loop.depth == 0 and loop.end - loop.start > 0.1 * t.seconds]
    longest = sorted(loops, key=lambda loop: loop.start - loop.end)[:2]
    return sorted(longest, key=lambda loop: loop.start) or [Loop("", 0, 1, 0.0, t.seconds, (0.0, t.seconds))]


def _lanes(t: Timeline, loop: Loop) -> list[str]:
    device, (begin, end) = t.devices[0].device, loop.iteration
    lanes = {s.lane for s in t.slices if s.device == device and s.end > begin and s.start < end}
    return sorted(lanes | {"core"}, key=lambda lane: (lane != "core", lane == "memory", lane))


def _describe_loop(phases: Phases, loop: Loop) -> str:
    phase, part = phases.phase(loop.name), phases.part(loop.name)
    if part:
        return f"{part}{' of ' + phase if phase else ''}"
    return {"forward": "layers, forward", "backward": "layers, backward"}.get(phase, "loop" if loop.name else "step")


def _unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e3, "ms") if seconds >= 2e-3 else (1e6, "us")


def _remove_frame(axes: Any) -> None:
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
