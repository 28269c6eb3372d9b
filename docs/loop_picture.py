"""Draws docs/img/loop.png: the staggered loop beside gathering first. A schematic; its widths are
no measurement.

python docs/loop_picture.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLOCKS = ["#3b6ea8", "#5d9a6b", "#d08a3e", "#9a5b8f"]  # one colour a device's block of x
# time of one hop and of one block's matmul, in blocks: compute bound, as large layers are
LINK, MATMUL = 0.8, 1.0
R = len(BLOCKS)


def bar(axes: plt.Axes, start: float, width: float, lane: int, block: int, text: str) -> None:
    """One span of time on one lane."""
    sent = lane == 0
    axes.broken_barh(
        [(start, width)],
        (lane + 0.14, 0.72),
        facecolor="white" if sent else BLOCKS[block],
        edgecolor=BLOCKS[block],
        linewidth=1.6,
        hatch="////" if sent else None,
    )
    color = BLOCKS[block] if sent else "white"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if sent else None
    axes.text(
        start + width / 2,
        lane + 0.5,
        text,
        ha="center",
        va="center",
        color=color,
        fontsize=9,
        bbox=box,
    )


def main() -> None:
    """Draws both schedules of device 0 on one time axis."""
    figure, panels = plt.subplots(2, 1, figsize=(9, 4.4), sharex=True, layout="constrained")
    gather, ring = panels
    for hop in range(R - 1):
        block = (-hop - 1) % R
        bar(gather, hop * LINK, LINK, 0, block, f"block {block}")
    for i in range(R):
        bar(gather, (R - 1) * LINK + i * MATMUL, MATMUL, 1, i, f"x{i} · w")
    for hop in range(R):
        block = -hop % R
        bar(ring, hop * MATMUL, MATMUL, 1, block, f"x{block} · w")
        if hop < R - 1:
            bar(ring, hop * MATMUL, LINK, 0, (-hop - 1) % R, f"block {(-hop - 1) % R}")
    gather.set_title('gather, then multiply (backend="none")', loc="left", fontsize=11)
    ring.set_title(
        "the staggered loop: multiply the block in hand while the next one travels",
        loc="left",
        fontsize=11,
    )
    for axes in panels:
        axes.set_yticks([0.5, 1.5], ["link", "matrix unit"])
        axes.set_ylim(0, 2)
        axes.set_xticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    end = (R - 1) * LINK + R * MATMUL
    gather.axvline(end, color="0.4", linestyle=":")
    ring.axvline(end, color="0.4", linestyle=":")
    ring.annotate(
        "",
        xy=(R * MATMUL, 0.5),
        xytext=(end, 0.5),
        arrowprops={"arrowstyle": "<->", "color": "0.4", "linewidth": 1.2},
    )
    ring.text(
        (R * MATMUL + end) / 2, 0.62, "hidden", ha="center", va="bottom", color="0.3", fontsize=10
    )
    panels[-1].set_xlabel("time on device 0 of 4 (schematic)")
    figure.savefig(pathlib.Path(__file__).parent / "img" / "loop.png", dpi=150)


if __name__ == "__main__":
    main()
