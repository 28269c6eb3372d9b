"""Draws docs/img/design.png: what calls what when a `ColumnParallelLinear` is applied, from the
layer to one hop.

python docs/design_picture.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, FAINT = "0.2", "0.45"
LAYERS = [  # label, colour, bottom, top
    ("nn\nmodules, global arrays", "#e8eef7", 7.15, 9.0),
    ("ops\nchecks, policy, gradients", "#e9f3ea", 3.85, 7.0),
    ("ring\none loop", "#fbf1e2", 2.0, 3.7),
    ("transport, kernels\nbytes and products", "#f4e9f2", 0.0, 1.85),
]
BOXES = {  # name: (x, y, width, title, what it does)
    "layer": (
        2.6,
        8.1,
        3.6,
        "nn/linear.py  ColumnParallelLinear",
        "holds kernel [in, out], sharded P(None, 'model')",
    ),
    "place": (
        7.1,
        8.1,
        3.6,
        "nn/placement.py  place, bind",
        "reads how x is sharded; jax.shard_map",
    ),
    "shards": (2.6, 7.25, 3.6, "nn/shards.py  column", "on local shards: casts, bias"),
    "api": (2.6, 6.1, 3.6, "ops/matmul/api.py  all_gather_matmul", "checks the call, once"),
    "choose": (
        7.1,
        6.1,
        3.6,
        "ops/choose.py  decide",
        "a backend: the named one, or what plan.py predicts",
    ),
    "vjp": (
        2.6,
        5.05,
        3.6,
        "ops/matmul/vjp.py  gather_and_multiply",
        "forward and gradient, over an Executor",
    ),
    "ringex": (
        2.6,
        4.0,
        3.6,
        "ops/matmul/ring.py  RingExecutor.gather",
        "multiplies a block, writes its rows of y",
    ),
    "fusedex": (
        7.1,
        4.0,
        3.6,
        "ops/matmul/fused.py  FusedExecutor.gather",
        "pads to whole hardware tiles",
    ),
    "collective": (
        2.6,
        2.95,
        3.6,
        "ring.py  ring_gather",
        "whose block this device holds after each hop",
    ),
    "loop": (
        2.6,
        2.1,
        3.6,
        "ring.py  staggered_loop",
        "start, window, done; two turns in a loop body",
    ),
    "xla": (2.6, 0.95, 1.7, "transport/xla.py", "lax.ppermute"),
    "pallas": (4.5, 0.95, 1.7, "transport/pallas.py", "two Pallas kernels"),
    "stateful": (4.5, 0.1, 1.7, "transport/stateful.py", "the same on Refs"),
    "kernel": (
        7.1,
        0.95,
        3.6,
        "kernels/all_gather_matmul",
        "one Pallas kernel sends and multiplies",
    ),
    "engine": (7.1, 0.1, 3.6, "kernels/engine", "tilings, slots, accumulators, ring protocol"),
}
ARROWS = [
    ("layer", "place"), ("layer", "shards"), ("shards", "api"), ("api", "choose"), ("api", "vjp"), ("vjp", "ringex"),
    ("vjp", "fusedex"), ("ringex", "collective"), ("collective", "loop"), ("loop", "xla"), ("loop", "pallas"),
    ("pallas", "stateful"), ("fusedex", "kernel"), ("kernel", "engine"),
]  # fmt: skip
HEIGHT = 0.66


def main() -> None:
    """Draws the layers of the code as bands, the files as boxes, and the calls as arrows."""
    figure, axes = plt.subplots(figsize=(11.5, 8.2), layout="constrained")
    for label, color, bottom, top in LAYERS:
        axes.add_patch(
            Rectangle((0, bottom), 11.0, top - bottom, facecolor=color, edgecolor="none")
        )
        name, what = label.split("\n")
        axes.text(
            0.15,
            (bottom + top) / 2 + 0.13,
            name,
            fontsize=11,
            fontweight="bold",
            va="center",
            color=INK,
        )
        axes.text(0.15, (bottom + top) / 2 - 0.17, what, fontsize=8.5, va="center", color=FAINT)
    for x, y, width, title, what in BOXES.values():
        axes.add_patch(
            FancyBboxPatch(
                (x, y), width, HEIGHT, boxstyle="round,pad=0,rounding_size=0.06", facecolor="white", edgecolor="0.6",
                linewidth=1.0,
            )
        )  # fmt: skip
        axes.text(x + width / 2, y + 0.44, title, ha="center", va="center", fontsize=8.6, color=INK)
        axes.text(
            x + width / 2, y + 0.18, what, ha="center", va="center", fontsize=7.8, color=FAINT
        )
    for source, target in ARROWS:
        (x, y, width, *_), (u, v, span, *_) = BOXES[source], BOXES[target]
        if y == v:
            start, end = (x + width, y + HEIGHT / 2), (u, v + HEIGHT / 2)
        elif x == u or (u > x and v < y and source == "loop"):
            start, end = (
                (u + span / 2 if source == "loop" else x + width / 2, y),
                (u + span / 2, v + HEIGHT),
            )
        else:
            start, end = (x + width, y + HEIGHT / 3), (u + 0.4, v + HEIGHT)
        dotted = (source, target) == ("pallas", "stateful")
        axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle="-" if dotted else "-|>", mutation_scale=11, linewidth=1.1, color="0.35",
                linestyle=":" if dotted else "-", shrinkA=1, shrinkB=1,
            )
        )  # fmt: skip
    axes.set_xlim(0, 11.0)
    axes.set_ylim(0, 9.0)
    axes.axis("off")
    figure.savefig(pathlib.Path(__file__).parent / "img" / "design.png", dpi=120)


if __name__ == "__main__":
    main()
