"""What the text of a program for NVIDIA GPUs says of the calls that XLA makes: matrix products of
cuBLAS and attention of cuDNN, which have no opcode of their own. Convolutions are not counted.
"""

import math
from typing import Any

from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape

# How the names of products begin: __cublas$lt$matmul, __cublas$lt$matmul$f8.
PRODUCTS = "__cublas"
# How the names of attention begin: __cudnn$fmhaSoftmax, __cudnn$fmhaSoftmaxBackward.
ATTENTION = "__cudnn$fmha"
_CALLS = (PRODUCTS, "__cudnn", "__cusolver", "__triton")
# in a backend_config: XLA for GPUs writes the first to what it runs
_NOTES = ('"operation_queue_id"', '"__triton')


def is_for_gpus(module: HloModule) -> bool:
    """Says whether a program was compiled for GPUs, by what only that compiler writes."""
    # lines that end alike share their attributes, so that few of them are read
    distinct = {id(i.attributes): i for i in module.instructions}
    return any(map(_is_for_gpus, distinct.values()))


def _is_for_gpus(i: Instruction) -> bool:
    config = i.attributes.get("backend_config", "")
    return i.custom_call_target.startswith(_CALLS) or any(note in config for note in _NOTES)


def is_product(i: Instruction) -> bool:
    """Says whether an instruction is a matrix product of cuBLAS."""
    return i.custom_call_target.startswith(PRODUCTS)


def product_of(i: Instruction) -> Instruction | None:
    """Returns the product of cuBLAS that an instruction runs: itself, or that of a fusion which
    slices the operands or the result of one; None if it runs none.
    """
    if is_product(i):
        return i
    if i.opcode != "fusion":
        return None
    for computation in i.called:
        if "custom-call" in computation.opcodes:
            return next(filter(is_product, computation.instructions), None)
    return None


def is_attention(i: Instruction) -> bool:
    """Says whether an instruction is attention by cuDNN, forward or backward."""
    return i.custom_call_target.startswith(ATTENTION)


def attention_flops(call: Instruction) -> float:
    """Returns the FLOPs of attention by cuDNN: two products of all scores, or five backward; half of
    them where it is causal, and only those of the window where it has one.

    Raises:
      HloError: The text does not say how many scores there are, or of how many features.
    """
    notes = call.backend_config.get("cudnn_fmha_backend_config", {})
    try:
        *batches, rows, columns = map(int, notes["intermediate_tensor_shape"]["dimensions"])
        window = int(notes.get("sliding_window_length", 0))
        head = call.inputs[0].shape.dimensions[-1]
    except (IndexError, KeyError, TypeError, ValueError):
        message = f"the attention '{call.name}' does not say how many scores it has"
        raise call.error(message) from None
    scores = float(rows * columns)
    if 0 < window < columns:
        scores = window * rows - window * (window - 1) / 2
    elif "CAUSAL" in str(notes.get("mask_type", "")):
        scores /= 2
    products = 2
    if "Backward" in call.custom_call_target:
        products = 5
    return 2.0 * products * math.prod(batches) * scores * head


def product_result(product: Instruction) -> Shape:
    """Returns the shape of a product, which the call returns beside its workspace."""
    return next(leaf for _, leaf in product.shape.leaves())


def returned_workspace(fusion: Instruction) -> int:
    """Returns the bytes of the workspace of a product of cuBLAS that a fusion returns; the call does
    not write all of it.
    """
    call = product_of(fusion)
    if call is None or call is fusion:
        return 0
    _, *workspaces = (leaf for _, leaf in call.shape.leaves())
    returned = [leaf for _, leaf in fusion.shape.leaves()]
    return sum(leaf.bytes for leaf in workspaces if leaf in returned)


def product_flops(product: Instruction) -> float:
    """Returns the FLOPs of a matrix product of cuBLAS; 0 if the text does not say over which
    dimensions it sums.

    Raises:
      HloError: What the text says of them cannot be read, or there are no such dimensions.
    """
    notes = _notes_of(product)
    if "dot_dimension_numbers" not in notes:
        return 0.0
    numbers: Any = notes["dot_dimension_numbers"]
    sizes = product.inputs[0].shape.dimensions if product.operands else ()
    try:
        summed = [sizes[int(n)] for n in numbers["lhs_contracting_dimensions"]]
    except (IndexError, KeyError, TypeError, ValueError):
        raise product.error(
            f"the product '{product.name}' sums over dimensions that cannot be read: got "
            f"{str(numbers)[:120]} for operands of {len(sizes)} dimensions"
        ) from None
    results = math.prod(max(size, 0) for size in product_result(product).dimensions)
    return 2.0 * results * math.prod(max(size, 0) for size in summed)


def accumulated_operand(product: Instruction) -> Instruction | None:
    """Returns what a product is added to, as it computes; None if it is added to nothing."""
    notes = _notes_of(product)
    if notes.get("beta", 0) == 0 or len(product.operands) < 3:
        return None
    return product.inputs[2]


def is_rounded(product: Instruction) -> bool:
    """Says whether a product may round its operands to fewer bits, as by JAX's default precision."""
    config = _notes_of(product).get("precision_config", {})
    if not isinstance(config, dict):
        return True
    precisions = config.get("operand_precision", [])
    return not isinstance(precisions, list) or all(one == "DEFAULT" for one in precisions)


def _notes_of(product: Instruction) -> dict:
    notes = product.backend_config.get("gemm_backend_config", {})
    if isinstance(notes, dict):
        return notes
    return {}
