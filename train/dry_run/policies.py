"""What each value of `model.remat` keeps of a layer, and what its backward pass makes again."""

import dataclasses

from models.config import Remat


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a value of `model.remat` does with the values of each layer, by the names of
    `layer_values` in memory.py.
    """

    keeps: tuple[str, ...]  # in the memory of the device, until the backward pass
    offloads: tuple[str, ...] = ()  # in that of the host
    # What the backward pass makes again: the results of `DeviceShare.layer_calls`, and "passes",
    # which are those over memory alone.
    repeats: tuple[str, ...] = ("passes",)


POLICIES: dict[Remat, Policy] = {
    "none": Policy(("residuals", "scores", "gathered", "kernels"), repeats=()),
    "cheap": Policy(("stream", "products", "attention", "statistics", "gathered", "kernels")),
    "dots": Policy(("stream", "products", "gathered"), repeats=("passes", "attention")),
    "operands": Policy(
        ("stream", "operands", "hidden", "gathered"), repeats=("passes", "attention", "added")
    ),
    "mlp": Policy(
        ("stream", "hidden", "added", "gathered"), repeats=("passes", "operands", "attention")
    ),
    "attention": Policy(
        ("stream", "operands", "attention", "statistics", "added", "gathered"),
        repeats=("passes", "hidden"),
    ),
    "layer": Policy(("stream",), repeats=("passes", "operands", "attention", "added", "hidden")),
    "offload": Policy(
        ("attention", "statistics"), ("stream", "operands"), ("passes", "added", "hidden")
    ),
    "offload_most": Policy(
        ("statistics",), ("stream", "operands", "attention"), ("passes", "added", "hidden")
    ),
}
