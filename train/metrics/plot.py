"""loss.png: training and validation loss over the steps, from metrics.jsonl."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from train.metrics.lines import read_metrics
from train.metrics.recorder import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRAINING, _VALIDATION, _GRID = "#2a6f97", "#d1495b", "#d9d9d9"  # colours
_SMOOTH_OVER = 50  # the bold curve averages over a fiftieth of the run on either side
_MIN_SECONDS_BETWEEN_PLOTS = 60.0  # drawing reads all lines so far, which takes long in a long run


class LossPicture:
    """A sink that draws loss.png after validations, at most once per minute, and when the run ends.

    It reads metrics.jsonl, so it must come after the sink that writes that file.
    """

    def __init__(self, metrics: Path, picture: Path, say: Callable[[str], None] = print):
        self._metrics, self._picture, self._say = metrics, picture, say
        self._drawn_at, self._is_new = time.monotonic(), True

    def write(self, lines: list[Line]) -> None:
        self._is_new = self._is_new and not lines
        validated = any("validation_loss" in line for line in lines)
        if validated and time.monotonic() - self._drawn_at > _MIN_SECONDS_BETWEEN_PLOTS:
            self._draw()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self._is_new or not self._picture.exists():
            self._draw()

    def _draw(self) -> None:
        try:
            draw_losses(self._metrics, self._picture)
        except OSError as error:  # the picture is a view of the metrics, which can be drawn later
            self._say(f"{self._picture} cannot be written: {error.strerror}")
        self._drawn_at, self._is_new = time.monotonic(), True


def draw_losses(metrics: Path, picture: Path) -> None:
    """Draws the curves of a metrics.jsonl and replaces the picture by one rename."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = loss_figure(read_metrics(metrics))
    temporary = picture.with_name(f".{picture.name}.tmp")
    FigureCanvasAgg(figure).print_figure(temporary, dpi=150, format="png")
    temporary.replace(picture)


def loss_figure(lines: list[Line]) -> "Figure":
    """Draws the training loss, faint as measured and bold as averaged, and the validation loss over the steps."""
    from matplotlib.figure import Figure  # matplotlib is imported late because it takes long to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps, losses = _series(lines, "loss")
    if steps:
        axes.plot(steps, losses, color=_TRAINING, alpha=0.3, linewidth=0.8)
        axes.plot(
            steps, _smooth(losses), color=_TRAINING, linewidth=1.8, label=f"training, {losses[-1]:.3f} at the end"
        )
    validated, validation = _series(lines, "validation_loss")
    if validated:
        label = f"validation, {validation[-1]:.3f} at the end"
        axes.plot(validated, validation, color=_VALIDATION, linewidth=1.8, marker="o", markersize=4, label=label)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(color=_GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if steps or validated:
        axes.legend(frameon=False)
    return figure


def _series(lines: list[Line], name: str) -> tuple[list[float], list[float]]:
    """Returns the steps that have a finite value of that name, and the values."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [float(step) for step, _ in points if step is not None], [
        float(value) for _, value in points if value is not None
    ]


def _smooth(values: list[float]) -> list[float]:
    """Returns a centred moving average.

    At the first values the window shrinks on both sides, so that the curve begins at the first value. At the last
    values it shrinks on the right side only, so that the end of the curve is still an average.
    """
    reach = len(values) // _SMOOTH_OVER
    sums = [0.0, *itertools.accumulate(values)]
    smoothed = []
    for index in range(len(values)):
        first = max(0, index - reach)
        last = min(index + reach, 2 * index, len(values) - 1)
        smoothed.append((sums[last + 1] - sums[first]) / (last + 1 - first))
    return smoothed
