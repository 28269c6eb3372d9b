"""Draws docs/img/ring_layouts.png: which products each device of a ring computes, in both layouts.

python docs/ring_pictures.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from flaxasync.kernels.attention_block import Mask
from flaxasync.ops.attention.layouts import LAYOUTS, Sequence, sequence_order
from flaxasync.ring import gathered_owner

BLOCKS = ["#3b6ea8", "#5d9a6b", "#d08a3e", "#9a5b8f"]  # one colour a device
R, CHUNKS = 4, 8


def scores(layout: str) -> tuple[np.ndarray, np.ndarray]:
    """(device, hop) of every chunk product, by query and key chunk; -1 where none is computed."""
    device_of, hop_of = np.full((2, CHUNKS, CHUNKS), -1)
    sequence = Sequence(layout, Mask(True, None), 2, R)  # type: ignore[arg-type]
    order = sequence_order(layout, CHUNKS, R).reshape(R, 2)  # type: ignore[arg-type]
    for device in range(R):
        for hop in range(R):
            owner = int(gathered_owner(device, hop, size=R, shift=1))
            for p in sequence.products(device, owner, own=hop == 0):
                if p.needed is not None and not p.needed:
                    continue
                for q in order[device][p.q_block * p.q_rows :][: p.q_rows]:
                    for k in order[owner][p.k_block * p.k_rows :][: p.k_rows]:
                        if k <= q:
                            device_of[q, k], hop_of[q, k] = device, hop
    return device_of, hop_of


def draw(square: plt.Axes, bars: plt.Axes, layout: str) -> None:
    """The causal square by device, and each device's chunk products by hop."""
    device_of, hop_of = scores(layout)
    for q in range(CHUNKS):
        for k in range(q + 1):
            color = BLOCKS[device_of[q, k]]
            square.add_patch(
                plt.Rectangle((k, q), 1, 1, facecolor=color, edgecolor="white", alpha=0.9)
            )
            square.text(
                k + 0.5,
                q + 0.5,
                str(hop_of[q, k]),
                ha="center",
                va="center",
                color="white",
                fontsize=9,
            )
    square.set_xlim(0, CHUNKS)
    square.set_ylim(CHUNKS, 0)
    square.set_aspect("equal")
    square.set_xticks(np.arange(CHUNKS) + 0.5, range(CHUNKS))
    square.set_yticks(np.arange(CHUNKS) + 0.5, range(CHUNKS))
    square.set_xlabel("chunk of keys")
    square.set_ylabel("chunk of queries")
    square.set_title(f'layout="{layout}"', loc="left", fontsize=11)
    for device in range(R):
        for hop in range(R):
            count = int(((device_of == device) & (hop_of == hop)).sum())
            bars.bar(hop + (device - 1.5) * 0.2, count, 0.18, color=BLOCKS[device])
    bars.set_xticks(range(R), [f"hop {hop}" for hop in range(R)])
    bars.set_ylim(0, 4.4)
    bars.set_ylabel("chunk products")
    for side in ("top", "right"):
        bars.spines[side].set_visible(False)


def main() -> None:
    """Draws both layouts side by side."""
    figure, panels = plt.subplots(
        2, 2, figsize=(9, 6.6), layout="constrained", height_ratios=(2.6, 1)
    )
    for column, layout in enumerate(LAYOUTS):
        draw(panels[0, column], panels[1, column], layout)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in BLOCKS]
    figure.legend(
        handles,
        [f"device {i}" for i in range(R)],
        loc="outside lower center",
        ncols=R,
        frameon=False,
    )
    figure.savefig(pathlib.Path(__file__).parent / "img" / "ring_layouts.png", dpi=150)


if __name__ == "__main__":
    main()
