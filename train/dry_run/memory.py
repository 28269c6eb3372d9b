"""Predicts the memory of a training step on a mesh, from the sizes of model and mesh alone."""

from collections.abc import Mapping

from train.dry_run.device_share import BYTES, DeviceShare

LOSS_ROWS = 3072  # the most rows of a block of `fa.nn.linear_cross_entropy`, by its default
# how often all scores of one layer's attention are in memory, if the layer computes them; assumed
SCORES_HELD = 3
# How much more of everything a scan that prefetches keeps, whose loop of two layers has residuals
# that XLA finds to be equal in a loop of one layer; fitted.
RESIDUALS = 1.73


def predicted_memory(here: DeviceShare) -> dict[str, int]:
    """Predicts the bytes that a step occupies on a device, by use; the uses add up to what the
    device needs.

    ```
    parameters       their number x bytes / (fsdp x model); in float32 if the run keeps master
                     copies, whose copies in model.param_dtype count with the gradients
    optimizer state  two moments like the parameters, the first one in
                     optimizer.first_moment_dtype
    gradients        like the parameters; with micro-batches a float32 sum beside them
    kept             for each layer what `model.remat` keeps, with none and cheap its gathered
                     kernels too, but for a scan that prefetches, which with none keeps all
                     residuals of its operations; and with all but layer the rows that
                     `model.gathered_mib` lets it keep
    working          what the largest of three phases has beside the above: `_working`
    ```

    Remat dots keeps the results of matmuls that the gradient needs: all but that of the down
    projection, which is only added, unless a norm follows it. Remat cheap keeps the result and the
    statistics of attention as well. With attention_softcap or alternating_window the activations of
    a layer include all attention scores, in float32.
    """
    optimizer = here.config.optimizer
    layers = here.model.layers
    share = (layers * here.kernels + here.outside) / (here.fsdp * here.ring)
    state = here.stored
    if optimizer.master_copies:
        state = 4
    moments = 2 * state
    if optimizer.first_moment_dtype:
        moments = state + BYTES[optimizer.first_moment_dtype]
    gradient = here.stored * (1 + optimizer.master_copies)
    if here.config.data.microbatches > 1:
        gradient += 4
    values = layer_values(here)
    kept = layers * sum(values[name] for name in here.policy.keeps)
    sizes = {
        "parameters": share * state,
        "optimizer state": share * moments,
        "gradients": share * gradient,
        "kept": kept,
        "working": _working(here, values, kept, share * here.stored),
    }
    return {name: round(size) for name, size in sizes.items()}


def _working(
    here: DeviceShare, values: Mapping[str, float], kept: float, gradients: float
) -> float:
    """Returns what the largest of three phases has beside what stays.

    ```
    layers     the activations of one layer, with the rows that a product gathers, and with remat
               layer the kept rows; the whole kernels of two layers; the gradient of the output
               projection
    loss       the whole kernel and gradient of the output projection, and the logits of one block
               of rows, before there are gradients of the parameters
    embedding  that gradient and two buffers for the embedding's, when no rows are kept any more
    ```

    The first two also have the layers' parameters in model.dtype, if they are stored in another.
    The gradient of the output projection is whole and in float32 until XLA reduce-scatters it,
    after the backward pass. Where the embedding needs the most, the compiler was seen to count 8 %
    more: so large buffers leave gaps.
    """
    model = here.model
    whole = values["whole kernels"]
    output_gradient = 4.0 * here.vocabulary * model.width
    cast = 0.0
    output = 0.0
    if here.stored != here.computed:
        cast = model.layers * here.kernels / (here.fsdp * here.ring) * here.computed
    if here.fsdp > 1 or cast:
        output = here.vocabulary * model.width * here.computed
    block = here.rows / max(-(-here.rows // LOSS_ROWS), 1)
    logits = 4 * block * here.vocabulary
    loss = output + output_gradient + logits + 2 * values["stream"] - gradients
    layer = values["everything"] + SCORES_HELD * values["scores"] + 2 * whole + output_gradient
    if here.ring > 1:
        layer += here.rows * model.width * here.computed
    if "gathered" not in here.policy.keeps:
        layer += values["gathered"]
    if here.prefetches:
        # The scan also has the gradients of two layers, and those that arrive or were cast; it
        # gathers the output projection meanwhile, and keeps the weights of the last layer.
        arriving = whole
        if model.fsdp_overlap == "prefetch":
            arriving = here.kernels / here.ring * here.stored
        layer += 2 * whole + arriving + output
        loss += whole
    return max(cast + layer, cast + loss, 3 * output_gradient - kept)


def layer_values(here: DeviceShare) -> dict[str, float]:
    """Returns the bytes of what one layer computes on a device for its gradient, by the names that
    `Policy` has.
    """
    model = here.model
    rows = here.rows / here.ring  # of the residual stream; or the share of all rows in any width
    hidden_features = model.mlp_width
    if model.experts:  # which keep none: they compute it again
        hidden_features = model.shared_expert_width
    value = rows * here.computed
    stream = value * model.width
    attention = value * model.head_features * model.heads
    operands = attention + 2 * value * model.head_features * model.kv_heads
    hidden = 2 * value * hidden_features
    added = (1 + model.post_norms) * stream
    products = operands + hidden + added
    everything = products + (5 - model.post_norms) * stream + attention + hidden
    scores = 0.0
    if model.attention_softcap is not None or model.alternating_window is not None:
        scores = 4.0 * here.rows * here.config.data.sequence_length * -(-model.heads // here.ring)
    whole_kernels = 0.0
    if here.fsdp > 1:
        whole_kernels = here.kernels / here.ring * here.computed
    residuals = everything
    kept_kernels = whole_kernels
    if here.prefetches:
        residuals = RESIDUALS * everything
        kept_kernels = 0.0
    return {
        "stream": stream,
        "operands": operands,
        "hidden": hidden,
        "added": added,
        "products": products,
        "attention": attention,
        "statistics": 4 * rows * model.heads,
        "everything": everything,
        "residuals": residuals,
        "scores": scores,
        "gathered": here.gathered_bytes,
        "whole kernels": whole_kernels,
        "kernels": kept_kernels,
    }
