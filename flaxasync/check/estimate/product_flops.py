"""The FLOPs of the matrix products in a program.

XLA for TPU writes most products as convolutions. It splits a dimension of the product in two, and
makes one of them a spatial dimension whose window slides over padding, as large as the window is,
on both sides. Products with padding, and with the holes that a dilation leaves, are not counted,
as XLA's own analysis of costs does not count them.
"""

import functools
import math
import re
from typing import NamedTuple

from flaxasync.check.hlo import gpu_calls
from flaxasync.check.hlo.module import MATMULS, Computation, Instruction
from flaxasync.check.hlo.shapes import HloError

# Of a convolution with more results along one dimension, all products are counted.
_MOST_RESULTS = 1 << 16


def flops_of(computation: Computation, known: dict[str, float]) -> float:
    """Returns the FLOPs of a computation and of the fusions in it. `known` has those that were
    asked for before.
    """
    if computation.name not in known:
        total = 0.0
        for i in computation.instructions:
            total += i.kernel_flops or 0
            if i.opcode in MATMULS:
                total += _product_flops(i)
            if gpu_calls.is_product(i):
                total += gpu_calls.product_flops(i)
            if gpu_calls.is_attention(i):
                total += gpu_calls.attention_flops(i)
            if i.opcode == "fusion":
                total += sum(flops_of(body, known) for body in i.called)
        known[computation.name] = total
    return known[computation.name]


def _product_flops(product: Instruction) -> float:
    shapes = [made.shape for made in product.inputs[:2]]
    if len(shapes) < 2 or any(shape.is_tuple for shape in shapes):
        raise _bad_product(
            product, f"needs two arrays: got {', '.join(map(str, shapes)) or 'no operand'}"
        )
    results = math.prod(max(size, 0) for size in product.shape.dimensions)
    if product.opcode == "dot":
        return 2.0 * results * _contracted(product)
    return 2.0 * results * _kernel_elements(product) * _share_of_real_products(product)


def _contracted(dot: Instruction) -> int:
    """Returns how many products are added up for one element of the result of a dot."""
    shape = dot.inputs[0].shape
    left = shape.dimensions
    contracted = [
        int(n[:9]) for n in re.findall(r"\d+", dot.attributes.get("lhs_contracting_dims", ""))
    ]
    if any(n >= len(left) for n in contracted):
        raise _bad_product(
            dot, f"sums over dimensions {contracted} of {shape}, which has {len(left)}"
        )
    return math.prod(max(left[n], 0) for n in contracted)


def _kernel_elements(convolution: Instruction) -> float:
    """Returns how many elements of its kernel belong to one element of the result of a
    convolution: all but those of other output features, "o".
    """
    shape = convolution.inputs[1].shape
    sizes = shape.dimensions
    labels = _labels(convolution).kernel
    if labels and len(labels) != len(sizes):
        raise _bad_product(
            convolution, f"labels the {len(sizes)} dimensions of its kernel {shape} with {labels!r}"
        )
    features = 1
    if "o" in labels:
        features = max(sizes[labels.index("o")], 1)
    return math.prod(max(size, 0) for size in sizes) / features


class _Labels(NamedTuple):
    """Which dimension of each array is which, one character a dimension: digits are spatial
    dimensions.
    """

    operand: str
    kernel: str
    result: str


def _labels(convolution: Instruction) -> _Labels:
    text = convolution.attributes.get("dim_labels", "")
    operands, _, result = text.partition("->")
    operand, _, kernel = operands.partition("_")
    return _Labels(operand, kernel, result)


def _share_of_real_products(convolution: Instruction) -> float:
    """Returns which share of the products of a convolution is one of two elements: the others are
    with padding, or with the holes of a dilation.
    """
    labels = _labels(convolution)
    window = convolution.attributes.get("window", "")
    share = 1.0
    for dimension in range(len(_window_field(window, "size"))):
        label = str(dimension)
        if label not in labels.operand or label not in labels.result:
            continue
        operand = convolution.inputs[0].shape.dimensions
        result = convolution.shape.dimensions
        places = (labels.operand.index(label), labels.result.index(label))
        if places[0] < len(operand) and places[1] < len(result):
            share *= _share_of_dimension(window, dimension, operand[places[0]], result[places[1]])
    return share


def _window_field(window: str, field: str) -> list[str]:
    """Returns what a window says of each spatial dimension: "2" and "3" of `size=2x3`."""
    found = re.search(rf"\b{field}=(\S+)", window.strip("{}"))
    if found is None:
        return []
    return found[1].split("x")


# a program has few kinds of products, and many of each
@functools.lru_cache(1024)
def _share_of_dimension(window: str, dimension: int, elements: int, results: int) -> float:
    def number(field: str) -> int:
        values = _window_field(window, field)
        if dimension < len(values) and values[dimension].isdecimal():
            return int(values[dimension][:9])
        return 1

    size = number("size")
    stride = number("stride")
    elements_apart = max(number("lhs_dilate"), 1)
    taps_apart = max(number("rhs_dilate"), 1)
    before = 0
    paddings = _window_field(window, "pad")
    if dimension < len(paddings):
        first = re.match(r"-?\d{1,9}", paddings[dimension])
        before = int(first[0]) if first else 0
    if not 0 < results <= _MOST_RESULTS or size < 1:
        return 1.0
    last = (elements - 1) * elements_apart
    real = 0
    for result in range(results):
        place = result * stride - before  # of the first tap of the window
        lowest = max(-(place // taps_apart), 0)  # the first tap that is not before all elements
        highest = min((last - place) // taps_apart, size - 1)
        real += _taps_on_elements(place, taps_apart, elements_apart, lowest, highest)
    return real / (size * results)


def _taps_on_elements(
    place: int, taps_apart: int, elements_apart: int, lowest: int, highest: int
) -> int:
    """Returns how many of the taps from the lowest to the highest are on an element, and not on a
    hole between two: for how many t `elements_apart` divides place + t * taps_apart.
    """
    common = math.gcd(taps_apart, elements_apart)
    if place % common != 0:
        return 0
    period = elements_apart // common  # of the taps that are on an element
    first = -place // common * pow(taps_apart // common, -1, period) % period
    return len(range(lowest + (first - lowest) % period, highest + 1, period))


def _bad_product(product: Instruction, what: str) -> HloError:
    return product.error(f"{product.opcode} '{product.name}' {what}")
