"""The floating-point operations that a compiled program performs in its matrix products, recomputed ones included."""

import math
import re

from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.module import Computation, HloModule, Instruction


def product_flops(module: HloModule, costs: Costs) -> float:
    """Returns the FLOPs of all products in one run on one device: those of XLA, and of kernels by their cost estimates.

    A kernel that was written without a cost estimate counts nothing.
    """
    return sum(runs * _flops(module, module.computations[name], set()) for name, runs in costs.executions().items())


def _flops(module: HloModule, computation: Computation, inside: set[str]) -> float:
    """Returns the FLOPs of a computation and of the fusions in it, except of one that contains itself."""
    total = 0.0
    for i in computation.instructions:
        total += i.kernel_flops or 0
        if i.opcode in ("dot", "convolution"):
            total += 2.0 * math.prod(i.shape.dimensions) * _summed(computation, i)
        for name in i.called_computations if i.opcode == "fusion" else ():
            if name in module.computations and name not in inside:
                total += _flops(module, module.computations[name], inside | {name})
    return total


def _summed(computation: Computation, product: Instruction) -> float:
    """Returns how many products are added up for one element of a result."""
    operands = [computation.by_name[name].shape.dimensions for name in product.operands[:2]]
    if product.opcode == "dot":
        summed = re.findall(r"\d+", product.attributes.get("lhs_contracting_dims", ""))
        return math.prod(operands[0][int(dim)] for dim in summed)
    # The kernel has a dimension of output features, "o"; every other element of it is multiplied for each result.
    kernel = product.attributes.get("dim_labels", "").partition("_")[2].partition("->")[0]
    features = operands[1][kernel.index("o")] if "o" in kernel else 1
    return math.prod(operands[1]) / max(features, 1)
