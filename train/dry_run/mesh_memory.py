"""Predicts the memory of a training step on a mesh, from the sizes of model and mesh alone."""

from collections.abc import Mapping

import flaxasync as fa
from flaxasync.hardware import Chip
from models.config import TransformerConfig
from train.config import Config
from train.metrics.model_flops import parameters_of_a_layer
from train.step.mesh import CONTEXT, FSDP, batch_shards
from train.step.products import products_of_a_layer

BYTES_OF_A_LOGIT = 8
"""What a logit of a micro-batch occupies: in bfloat16 forward, with its gradient, and once in float32. Assumed."""
WORKING_ROWS = 3
"""How often the activations of one layer are in memory while it is computed backward, as such and as gradients.
Assumed."""
_BYTES = {"float32": 4, "bfloat16": 2}


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element of a type of `models.config`."""
    return _BYTES[dtype]


def parameters_outside(model: TransformerConfig) -> int:
    """Returns the number of elements in the embedding and, if it is not tied to that, the output projection."""
    return model.vocab_size * model.width * (1 if model.tie_embeddings else 2)


def predicted_memory(config: Config, mesh: Mapping[str, int], chip: Chip | None = None) -> dict[str, int]:
    """Predicts the bytes that a step occupies on a device, by use; the uses add up to what the device needs.

    ```
    parameters         their number x bytes / (fsdp x model); in float32 if the run keeps master copies, whose copies in
                       model.param_dtype count with the gradients
    optimizer state    two moments like the parameters; a float32 running mean if the run keeps one
    gradients          like the parameters; with micro-batches a float32 sum beside them
    kept               for each layer what `model.remat` keeps, with none and cheap its gathered kernels too, but for a
                       scan that prefetches; and with all but layer the rows that `model.gathered_mib` lets it keep
    working            the larger of two sums: the activations of one layer and the whole kernels of two, with remat
                       layer the kept rows as well; the logits and the whole kernel of the output projection
    ```

    Remat dots keeps the results of matmuls that the gradient needs: all but that of the down projection, which is only
    added, unless a norm follows it. Remat cheap keeps the statistics of attention as well, and its result
    twice: for its own gradient and for that of the projection after it, each of which is in a `shard_map` of its own.

    The activations of a layer include its attention scores, in float32, where all of them are in memory: with
    attention_softcap or alternating_window.

    Args:
      config: The run; its own mesh is not read.
      mesh: The sizes of the axes.
      chip: The chip, by whose costs rows are kept or sent again; None for chips without a data sheet, on which they are
        kept wherever the memory allows it.
    """
    model, optimizer, parts = config.model, config.optimizer, config.data.microbatches
    fsdp, context, ring = mesh.get(FSDP, 1), mesh.get(CONTEXT, 1), mesh["model"]
    kernels, outside = parameters_of_a_layer(model), parameters_outside(model)
    share = (model.layers * kernels + outside) / (fsdp * ring)
    stored, computed = itemsize(model.param_dtype), itemsize(model.dtype)
    state = 4 if optimizer.master_copies else stored
    rows = config.data.batch_size // (batch_shards(mesh) * parts) * (config.data.sequence_length // context)
    stream = rows / ring * model.width * computed
    q_width, kv_width = model.head_features * model.heads, model.head_features * model.kv_heads
    products = rows / ring * (q_width + 2 * kv_width + 2 * model.mlp_width) * computed + (1 + model.post_norms) * stream
    everything = products + (5 - model.post_norms) * stream + rows / ring * (q_width + 2 * model.mlp_width) * computed
    if model.attention_softcap is not None or model.alternating_window is not None:
        everything += 4 * rows * config.data.sequence_length * -(-model.heads // ring)
    whole = 0.0 if fsdp == 1 else kernels / ring * computed
    # A scan that prefetches also has the gradients of two layers, and those that arrive or were cast; and, meanwhile,
    # keeps the weights of the last layer.
    arriving = {"xla": 0.0, "prefetch": 2 * whole + kernels / ring * stored, "prefetch_pallas": 3 * whole}[
        model.fsdp_overlap
    ]
    last = whole if arriving else 0.0
    attention, kernels_kept = rows / ring * (2 * q_width * computed + 4 * model.heads), 0.0 if arriving else whole
    kept = {
        "layer": stream,
        "dots": stream + products,
        "cheap": stream + products + attention + kernels_kept,
        "none": everything + kernels_kept,
    }[model.remat]
    gathered = gathered_bytes(config, mesh, chip)
    kept += gathered if model.remat != "layer" else 0
    again = gathered if model.remat == "layer" else 0
    logits = rows * -(-model.vocab_size // ring) * BYTES_OF_A_LOGIT
    output = 0.0 if fsdp == 1 else model.vocab_size * model.width / ring * computed
    beside = output if arriving else 0.0  # a scan that prefetches gathers it while the layers run
    sizes = {
        "parameters": share * state,
        "optimizer state": share * (2 * state + 4 * bool(optimizer.ema_decay)),
        "gradients": share * (stored * (1 + optimizer.master_copies) + 4 * (parts > 1)),
        "kept": model.layers * kept,
        "working": max(WORKING_ROWS * everything + 2 * whole + again + arriving + beside, logits + output + last),
    }
    return {name: round(size) for name, size in sizes.items()}


def gathered_bytes(config: Config, mesh: Mapping[str, int], chip: Chip | None) -> int:
    """Returns the bytes of gathered rows that attention and MLP of one layer keep on a device for their gradients."""
    model, ring = config.model, mesh["model"]
    limit, computed = model.gathered_mib * 2**20, itemsize(model.dtype)
    batch = config.data.batch_size // (batch_shards(mesh) * config.data.microbatches)
    length = config.data.sequence_length // mesh.get(CONTEXT, 1)
    each = batch * length * model.width * computed
    if ring == 1 or each > limit:
        return 0
    if chip is None:
        return 2 * each
    kept = 0
    for op, x, w in products_of_a_layer(model, batch=batch, length=length, ring=ring):
        if op == "all_gather_matmul":
            plan = fa.plan(op, x, w, chip=chip, ring=ring, itemsize=computed, gathered_bytes=limit)
            kept += plan.costs.get(config.backend, plan.costs[plan.backend]).kept
    return kept
