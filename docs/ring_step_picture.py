"""Draws docs/img/ring_step.png: one step of a ring of four devices, with the words of
docs/glossary.md at their places.

python docs/ring_step_picture.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

BLOCKS = ["#3b6ea8", "#5d9a6b", "#d08a3e", "#9a5b8f"]  # one colour for the block of each device
INK = "0.25"
R, HOP = len(BLOCKS), 1  # the step that is drawn: every block has made one hop
WIDTH, GAP = 2.15, 0.95  # of a device, and of the link beside it


def block_rows(axes: plt.Axes, x: float, y: float, color: str, *, arriving: bool) -> None:
    """Draws one slot: a block of four tiles of rows; what is still arriving is hatched."""
    for tile in range(4):
        axes.add_patch(
            Rectangle(
                (x, y + tile * 0.2), 0.85, 0.2, facecolor="white" if arriving else color, edgecolor=color,
                hatch="////" if arriving else None, linewidth=1.1,
            )
        )  # fmt: skip
        if not arriving:
            axes.plot([x, x + 0.85], [y + tile * 0.2] * 2, color="white", linewidth=0.9)


def note(axes: plt.Axes, text: str, at: tuple[float, float], words: tuple[float, float]) -> None:
    """Writes a word of the glossary with a thin line to what it names."""
    axes.annotate(
        text, xy=at, xytext=words, ha="center", va="center", fontsize=9.5, color=INK,
        arrowprops={"arrowstyle": "-", "color": "0.45", "linewidth": 0.8, "shrinkA": 1, "shrinkB": 1},
    )  # fmt: skip


def device(axes: plt.Axes, index: int) -> None:
    """Draws a device: the block in hand, the receive buffer, and the product with its own columns
    of w.
    """
    x = index * (WIDTH + GAP)
    axes.add_patch(
        Rectangle((x, 0), WIDTH, 3.0, facecolor="#f5f5f3", edgecolor="0.6", linewidth=1.2)
    )
    axes.text(
        x + WIDTH / 2,
        2.8,
        f"device {index}",
        ha="center",
        va="center",
        fontsize=10,
        fontweight="bold",
    )
    block_rows(axes, x + 1.16, 1.7, BLOCKS[(index - HOP) % R], arriving=False)
    block_rows(axes, x + 0.14, 1.7, BLOCKS[(index - HOP - 1) % R], arriving=True)
    axes.add_patch(Rectangle((x + 0.14, 0.15), 0.85, 0.85, facecolor="#d9d9d9", edgecolor="0.5"))
    axes.text(x + 0.565, 0.575, "w", ha="center", va="center", fontsize=11)
    axes.add_patch(Rectangle((x + 1.16, 0.15), 0.85, 0.85, facecolor="white", edgecolor="0.5"))
    axes.add_patch(
        Rectangle((x + 1.16, 0.79 - 0.21 * ((index - HOP) % R)), 0.85, 0.2, facecolor="0.55")
    )
    axes.text(x + 1.585, 1.15, "y", ha="center", va="center", fontsize=11)
    axes.text(
        x + 1.585,
        1.5,
        f"x{(index - HOP) % R} · w",
        ha="center",
        va="center",
        fontsize=10,
        color=INK,
    )


def main() -> None:
    """Draws four devices in a row, the link that closes the ring below them."""
    figure, axes = plt.subplots(figsize=(12, 4.5), layout="constrained")
    for index in range(R):
        device(axes, index)
        x = index * (WIDTH + GAP)
        if index < R - 1:
            start, end, path = (x + 2.01, 2.1), (x + WIDTH + GAP + 0.14, 2.1), "arc3"
        else:
            start, end, path = (x + 1.0, -0.02), (1.0, -0.02), "arc3,rad=-0.09"
        arrow = FancyArrowPatch(
            start, end, connectionstyle=path, arrowstyle="-|>", mutation_scale=15, linewidth=1.6,
            color=BLOCKS[(index - HOP) % R], zorder=5,
        )  # fmt: skip
        axes.add_patch(arrow)
    right = R * (WIDTH + GAP) - GAP
    note(axes, "block: what one device\nsends in one hop", (1.6, 2.52), (2.35, 3.75))
    note(
        axes,
        "receive buffer: the other slot,\nwhere the next block arrives",
        (0.55, 2.52),
        (-0.1, 3.75),
    )
    note(axes, "hop: a transfer to the\nnext device on the ring", (5.8, 2.15), (5.8, 3.75))
    note(
        axes,
        "tile: what one matrix-unit\nproduct works on",
        (right - 0.35, 2.3),
        (right + 0.55, 3.75),
    )
    note(axes, "the rows of y that\nthis step writes", (right - 0.3, 0.47), (right + 1.0, 0.95))
    axes.text(
        right / 2, -1.05, "direction +1: device i sends to device i + 1; the last one closes the "
                          "ring", ha="center",
        fontsize=9.5, color=INK,
    )  # fmt: skip
    axes.set_xlim(-1.3, right + 1.9)
    axes.set_ylim(-1.2, 4.1)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(pathlib.Path(__file__).parent / "img" / "ring_step.png", dpi=130)


if __name__ == "__main__":
    main()
