"""loss.png: training and validation loss over the steps, from metrics.jsonl."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from train.metrics.lines import read_metrics
from train.metrics.recorder import Sink

_SMOOTH_OVER = 50  # the bold curve averages over a fiftieth of the run on either side


class LossPicture(Sink):
    """Draws loss.png when the run stops or ends. It reads metrics.jsonl, so it comes after the sink of that file."""

    def __init__(self, metrics: Path, picture: Path, say: Callable[[str], None] = print):
        self._metrics, self._picture, self._say = metrics, picture, say

    def close(self) -> None:
        try:
            draw_losses(self._metrics, self._picture)
        except OSError as error:  # the picture is a view of the metrics, which can be drawn later
            self._say(f"{self._picture} cannot be written: {error.strerror}")


def draw_losses(metrics: Path, picture: Path) -> None:
    """Draws the training loss, faint as measured and bold as averaged, and the validation loss over the steps."""
    from matplotlib.figure import Figure  # imported late, because that takes long

    lines = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step (optimizer updates)", ylabel="loss (nats per token)")
    axes.grid(color="#d9d9d9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    for metric, name, colour, style in (
        ("loss", "training", "#2a6f97", {"alpha": 0.3, "linewidth": 0.8}),
        ("validation_loss", "validation", "#d1495b", {"linewidth": 1.8, "marker": "o", "markersize": 4}),
    ):
        points = np.array([(line["step"], line[metric]) for line in lines if line.get(metric) is not None], float)
        if not len(points):
            continue
        axes.plot(*points.T, color=colour, label=f"{name}, {points[-1, 1]:.3f} at the end", **style)
        if metric == "loss":
            axes.plot(*average(points).T, color=colour, linewidth=1.8)
        axes.legend(frameon=False)
    temporary = picture.with_name(f".{picture.name}.tmp")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(picture)


def average(points: np.ndarray) -> np.ndarray:
    """Returns a centred moving average of points [count, 2], without the ends where the window is not full."""
    width = 2 * (len(points) // _SMOOTH_OVER) + 1
    window = np.full(width, 1 / width)
    return np.stack([np.convolve(column, window, "valid") for column in points.T], axis=1)
