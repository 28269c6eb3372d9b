"""Predicts the time and the memory of a training step on a mesh, from the sizes of model and mesh
alone.

Nothing is traced or compiled, so that all meshes of a topology can be ranked in a second. The
prediction ranks meshes. It does not replace `--dry-run`, which compiles the step.

```
rows of a device       b = batch / (data x fsdp x micro-batches) sequences of L / context tokens
matmuls of a layer     four collective matmuls over the model axis, by the costs of `flaxasync.plan`
attention              by the costs of ring attention, over the context axis if there is one
fsdp                   each kernel gathered forward, and backward if it is not kept; each gradient reduce-scattered
data, context          each gradient all-reduced, at its share of the parameters
memory of the host     what a policy offloads, beside the work of its pass; nothing where the rate of PCIe is unknown
optimizer              state and gradients cross HBM
```

Transfers over fsdp and data take the time of `flaxasync.check`'s model of a ring on idle links.
XLA's hold the core: in the compiled step of the preset llama_8b all of its collectives over these
axes are synchronous, on v5e as well. A scan that prefetches hides those of layers and output
projection behind the work of layers, but for the first gather and the last reduce-scatter.
Constants that are called fitted were chosen by the time that `flaxasync.check` estimates for this
step on v5e:4x4.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import flaxasync as fa
from flaxasync.check.estimate.costs import collective_seconds
from flaxasync.hardware import Chip
from flaxasync.ops.roofline import hbm
from models.config import FsdpOverlap, Remat, TransformerConfig
from models.layer import quantization_of
from train.config import Config
from train.step.mesh import AXES, CONTEXT, FSDP, batch_shards
from train.step.products import (
    experts_of_a_layer,
    hidden_of_a_token,
    local_heads,
    model_flops_per_token,
    parameters_of_a_layer,
    products_of_a_layer,
)

# How many times a device moves values through HBM. The backward pass of a layer moves twice what
# its forward pass does. its rows of the residual stream, for norms, rotary positions and residuals,
# in a layer; fitted
ROWS_MOVED = 8
HIDDEN_MOVED = 2  # the hidden features of the MLP, in a layer; fitted
# float32 logits: XLA writes those of a block once and reads them three times, on v6e
LOGITS_MOVED = 4
LOSS_ROWS = 3072  # the most rows of a block of `fa.nn.linear_cross_entropy`, by its default
# what a scan that prefetches by permutes sends: blocks are cut out, added and written; fitted
UPDATES_MOVED = 8
# how often all scores of one layer's attention are in memory, if the layer computes them; assumed
SCORES_HELD = 3
PREDICTED = "predicted"
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a value of `model.remat` does with the values of each layer, by the names of
    `_kinds_of_values`.
    """

    keeps: tuple[str, ...]  # in the memory of the device, until the backward pass
    offloads: tuple[str, ...] = ()  # in that of the host
    repeats: tuple[str, ...] = ()  # the work of the forward pass that the backward pass does again


POLICIES: dict[Remat, Policy] = {
    "none": Policy(("everything", "scores", "gathered", "kernels")),
    "cheap": Policy(
        ("stream", "products", "attention", "statistics", "gathered", "kernels"),
        repeats=("passes",),
    ),
    "dots": Policy(("stream", "products", "gathered"), repeats=("passes", "attention")),
    "layer": Policy(("stream",), repeats=("passes", "attention", "matmuls")),
    "offload": Policy(("attention", "statistics"), ("stream", "operands"), ("passes", "matmuls")),
    "offload_most": Policy(
        ("statistics",), ("stream", "operands", "attention"), ("passes", "matmuls")
    ),
}
# What such a scan keeps in place of some of them: it gathers kernels again, and its loop of two
# layers keeps residuals that XLA finds to be equal in a loop of one layer.
_IN_A_PREFETCHING_SCAN = {"everything": "residuals", "kernels": "none"}
AUTOMATIC: tuple[Remat, ...] = ("none", "cheap", "dots", "layer")
"""What a run chooses from. Around the transfers to the host, XLA was seen to copy the stacks of all
layers.
"""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A form of the step on a mesh, and what it takes, in seconds and in bytes of a device:
    predicted, or compiled.
    """

    mesh: Mapping[str, int]
    remat: Remat
    overlap: FsdpOverlap
    memory: Mapping[str, int]  # by use
    work: float  # time in which the core works
    # time in which the core waits for other devices, by the axis and the transfer
    waits: Mapping[str, float]
    mfu: float  # model FLOPs utilization, 0 to 1
    available: int  # memory that programs can use
    source: str = PREDICTED  # of the figures; others are those of `train.dry_run.compare_meshes`

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all four axes, of which `mesh` may lack those of one device."""
        return {axis: self.mesh.get(axis, 1) for axis in AXES}

    @property
    def form(self) -> str:
        """The options of the command line that name the form."""
        return form_options(self.remat, self.overlap)

    @property
    def options(self) -> str:
        """The options of the command line that name the mesh and the form."""
        return " ".join(
            [*(f"--mesh.{axis} {size}" for axis, size in self.sizes.items()), self.form]
        )

    @property
    def needed(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def exposed(self) -> float:
        return sum(self.waits.values())

    @property
    def seconds(self) -> float:
        return self.work + self.exposed

    @property
    def binds(self) -> str:
        """What takes most of the time beside the work: the name of a wait; "matmuls" if waits are
        below 5 %.
        """
        if self.exposed < 0.05 * self.seconds:
            return "matmuls"
        return max(self.waits, key=lambda name: self.waits[name])


def form_options(remat: Remat, overlap: FsdpOverlap) -> str:
    return f"--model.remat {remat} --model.fsdp_overlap {overlap}"


def predict(config: Config, chip: Chip, mesh: Mapping[str, int]) -> Prediction:
    """Predicts a step of a run on a mesh that it divides over; of the run's own mesh only
    `context_layout` is read.
    """
    model = config.model
    parts = config.data.microbatches
    context = mesh.get(CONTEXT, 1)
    ring = mesh["model"]
    batch = config.data.batch_size // (batch_shards(mesh) * parts)
    length = config.data.sequence_length // context
    layer_work, model_wait, context_wait = _layer(config, chip, batch, length, context, ring)
    head_work, head_wait = _head(model, chip, batch, length, ring)
    remat = model.remat or "none"
    overlap = model.fsdp_overlap or "xla"
    policy = POLICIES[remat]
    fsdp_wait, reduce_wait, moved = _parameter_waits(config, chip, mesh, layer_work)
    values = _kinds_of_values(config, mesh, chip)
    host = sum(values[name] for name in policy.offloads) / (chip.host_bandwidth or math.inf)
    # the backward pass takes twice the forward's
    forward = layer_work / (4 if "matmuls" in policy.repeats else 3)
    # each way has its own lane
    host_wait = max(0.0, host - forward) + max(0.0, host - (layer_work - forward))
    memory = predicted_memory(config, mesh, chip)
    state = memory["parameters"] + memory["optimizer state"]
    optimizer = (2 * state + 2 * memory["gradients"]) / hbm(chip)
    work = parts * (model.layers * layer_work + head_work + moved / hbm(chip)) + optimizer
    waits = {
        "model: activations": parts * (model.layers * model_wait + head_wait),
        "context: keys and values": parts * model.layers * context_wait,
        "fsdp: weights and gradients": parts * fsdp_wait,
        "data: gradients": parts * reduce_wait,
        "host: activations": parts * model.layers * host_wait,
    }
    tokens = config.data.batch_size * config.data.sequence_length
    devices = batch_shards(mesh) * context * ring
    flops = tokens * model_flops_per_token(model, config.data.sequence_length)
    seconds = work + sum(waits.values())
    mfu = flops / (seconds * devices * chip.flops)
    return Prediction(dict(mesh), remat, overlap, memory, work, waits, mfu, round(chip.hbm_bytes))


def predicted_memory(
    config: Config, mesh: Mapping[str, int], chip: Chip | None = None
) -> dict[str, int]:
    """Predicts the bytes that a step occupies on a device, by use; the uses add up to what the
    device needs.

    ```
    parameters         their number x bytes / (fsdp x model); in float32 if the run keeps master copies, whose copies in
                       model.param_dtype count with the gradients
    optimizer state    two moments like the parameters, the first one in optimizer.first_moment_dtype; a float32 running
                       mean if the run keeps one
    gradients          like the parameters; with micro-batches a float32 sum beside them
    kept               for each layer what `model.remat` keeps, with none and cheap its gathered kernels too, but for a
                       scan that prefetches, which with none keeps all residuals of its operations; and with all but
                       layer the rows that `model.gathered_mib` lets it keep
    working            what the largest of three phases has beside the above. Layers: the activations of one layer, with
                       the rows that a product gathers, and with remat layer the kept rows; the whole kernels of two
                       layers; the gradient of the output projection. Loss: the whole kernel and gradient of the output
                       projection, and the logits of one block of rows, before there are gradients of the parameters.
                       Embedding: that gradient and two buffers for the embedding's, when no rows are kept any more.
                       The first two also have the layers' parameters in model.dtype, if they are stored in another
    ```

    The gradient of the output projection is whole and in float32 until XLA reduce-scatters it,
    after the backward pass. Where the embedding needs the most, the compiler was seen to count 8 %
    more: so large buffers leave gaps.

    Remat dots keeps the results of matmuls that the gradient needs: all but that of the down
    projection, which is only added, unless a norm follows it. Remat cheap keeps the result and the
    statistics of attention as well. With attention_softcap or alternating_window the activations of
    a layer include all attention scores, in float32.

    `chip` says by whose costs rows are kept or sent again; without one they are kept wherever the
    limit allows it.
    """
    model = config.model
    optimizer = config.optimizer
    parts = config.data.microbatches
    fsdp = mesh.get(FSDP, 1)
    context = mesh.get(CONTEXT, 1)
    ring = mesh["model"]
    kernels = parameters_of_a_layer(model)
    outside = _parameters_outside(model)
    share = (model.layers * kernels + outside) / (fsdp * ring)
    stored = _BYTES[model.param_dtype]
    computed = _BYTES[model.dtype]
    state = 4 if optimizer.master_copies else stored
    first_moment = _BYTES[optimizer.first_moment_dtype] if optimizer.first_moment_dtype else state
    rows = (
        config.data.batch_size
        // (batch_shards(mesh) * parts)
        * (config.data.sequence_length // context)
    )
    values = _kinds_of_values(config, mesh, chip)
    policy = POLICIES[model.remat or "none"]
    stream = values["stream"]
    whole = values["kernels"]
    # A scan that prefetches also has the gradients of two layers, and those that arrive or were
    # cast; and, meanwhile, keeps the weights of the last layer.
    prefetched = {
        "xla": 0.0,
        "prefetch": 2 * whole + kernels / ring * stored,
        "prefetch_pallas": 3 * whole,
    }
    arriving = prefetched[model.fsdp_overlap or "xla"]
    last = whole if arriving else 0.0
    keeps = policy.keeps
    if arriving:
        keeps = tuple(_IN_A_PREFETCHING_SCAN.get(name, name) for name in keeps)
    kept = sum(values[name] for name in keeps)
    again = 0 if "gathered" in (*policy.keeps, *policy.offloads) else values["gathered"]
    cast = model.layers * kernels / (fsdp * ring) * computed if stored != computed else 0.0
    vocabulary = -(-model.vocab_size // ring)
    output = vocabulary * model.width * computed if fsdp > 1 or stored != computed else 0.0
    beside = output if arriving else 0.0  # a scan that prefetches gathers it while the layers run
    output_gradient = 4 * vocabulary * model.width
    block = rows / max(-(-rows // LOSS_ROWS), 1)
    loss = output + output_gradient + 4 * block * vocabulary + 2 * stream - share * stored
    layer = (
        values["everything"]
        + SCORES_HELD * values["scores"]
        + (rows * model.width * computed if ring > 1 else 0)
    )
    layer += 2 * whole + again + arriving + beside + output_gradient
    sizes = {
        "parameters": share * state,
        "optimizer state": share * (first_moment + state + 4 * bool(optimizer.ema_decay)),
        "gradients": share * (stored * (1 + optimizer.master_copies) + 4 * (parts > 1)),
        "kept": model.layers * kept,
        "working": max(cast + layer, cast + loss + last, 3 * output_gradient - model.layers * kept),
    }
    return {name: round(size) for name, size in sizes.items()}


def _parameter_waits(
    config: Config, chip: Chip, mesh: Mapping[str, int], work: float
) -> tuple[float, float, float]:
    """Returns the waits for fsdp and for data in a micro-batch, and the bytes that permutes move
    through HBM.
    """
    model = config.model
    layers = config.model.layers
    kernels = parameters_of_a_layer(config.model)
    fsdp = mesh.get(FSDP, 1)
    others = mesh["data"] * mesh.get(CONTEXT, 1)
    stored = _BYTES[model.param_dtype]
    computed = _BYTES[model.dtype]
    direct = model.fsdp_overlap == "prefetch_pallas"
    beside = model.fsdp_overlap not in (None, "xla")

    def seconds(
        parameters: int, *, copied: bool = False, travels: float = computed
    ) -> tuple[float, float, float]:
        """Returns those of a gather and of a reduce-scatter over fsdp, and of an all-reduce of the
        shard over data.
        """
        # Direct copies send R^2 / 8 blocks over a link where a ring sends (R - 1) / 2, and
        # gradients as they are made.
        whole = parameters / mesh["model"]
        longer = fsdp**2 / (4 * (fsdp - 1)) if copied else 1.0
        gather = collective_seconds("all-gather", 0, int(whole * travels), fsdp, chip)
        scatter = collective_seconds(
            "reduce-scatter", int(whole * (computed if copied else stored)), 0, fsdp, chip
        )
        shard = int(whole / fsdp * stored)
        return (
            gather * longer,
            scatter * longer,
            collective_seconds("all-reduce", shard, shard, others, chip),
        )

    output = 0 if model.tie_embeddings or not beside else _parameters_outside(model) // 2
    gather, scatter, total = seconds(_parameters_outside(model) - output)
    travels = float(computed)
    # those of a mixture of experts are not quantised
    if model.quantization is not None and not beside:
        attention = 2 * model.width * model.head_features * (model.heads + model.kv_heads)
        travels -= (computed - 1) * (attention / kernels if model.experts else 1)
    layer = seconds(kernels, copied=direct, travels=travels)
    last = seconds(output, copied=direct)
    if not beside:
        gathers = 1 if "kernels" in POLICIES[model.remat or "none"].keeps else 2
        return (
            gather + scatter + layers * (gathers * layer[0] + layer[1]),
            total + layers * layer[2],
            0.0,
        )
    travel = layers * (2 * layer[0] + layer[1])
    summed = layers * layer[2]
    work = layers * work
    moved = UPDATES_MOVED * (layers * kernels + output) / mesh["model"] * (2 * computed + stored)
    if fsdp == 1:  # two devices exchange whole gradients and cut nothing
        return 0.0, total + max(0.0, summed + last[2] - work), 0.0 if others == 2 else moved
    wait = gather + scatter + layer[0] + layer[1] + max(0.0, travel + last[0] + last[1] - work)
    return wait, total + last[2] + summed, 0.0 if direct else moved


def _kinds_of_values(
    config: Config, mesh: Mapping[str, int], chip: Chip | None
) -> dict[str, float]:
    """Returns the bytes of what one layer computes on a device for its gradient, by the names that
    `Policy` has.
    """
    model = config.model
    ring = mesh["model"]
    computed = _BYTES[config.model.dtype]
    sequences = config.data.batch_size // (batch_shards(mesh) * config.data.microbatches)
    rows = sequences * (config.data.sequence_length // mesh.get(CONTEXT, 1))
    stream = rows / ring * model.width * computed
    q_width = model.head_features * model.heads
    kv_width = model.head_features * model.kv_heads
    operands = rows / ring * (q_width + 2 * kv_width) * computed
    # experts keep none: they compute it again
    hidden = model.shared_expert_width if model.experts else model.mlp_width
    products = operands + rows / ring * 2 * hidden * computed + (1 + model.post_norms) * stream
    scores = 0.0
    if model.attention_softcap is not None or model.alternating_window is not None:
        scores = 4 * rows * config.data.sequence_length * -(-model.heads // ring)
    passes = (5 - model.post_norms) * stream + rows / ring * (q_width + 2 * hidden) * computed
    residuals = stream + rows / ring * (4 * q_width + 2 * kv_width + 6 * hidden) * computed
    # norms compute in float32
    residuals += 3 * 4 * rows / ring * (2 + 2 * model.post_norms) * model.width
    residuals += 3 * 4 * rows / ring * (q_width + kv_width) * model.qk_norm
    residuals += rows * 2 * 4 * model.head_features  # sines and cosines of positions
    return {
        "stream": stream,
        "operands": operands,
        "products": products,
        "attention": rows / ring * q_width * computed,
        "statistics": rows / ring * 4 * model.heads,
        "everything": products + passes,
        "residuals": residuals,
        "none": 0.0,
        "scores": scores,
        "gathered": _gathered_bytes(config, mesh, chip),
        "kernels": 0.0
        if mesh.get(FSDP, 1) == 1
        else parameters_of_a_layer(model) / ring * computed,
    }


def _gathered_bytes(config: Config, mesh: Mapping[str, int], chip: Chip | None) -> int:
    """Returns the bytes of gathered rows that attention and MLP of one layer keep on a device for
    their gradients.
    """
    model = config.model
    ring = mesh["model"]
    limit = model.gathered_mib * 2**20
    computed = _BYTES[model.dtype]
    travelling = computed if model.quantization is None else 1
    batch = config.data.batch_size // (batch_shards(mesh) * config.data.microbatches)
    length = config.data.sequence_length // mesh.get(CONTEXT, 1)
    each = batch * length * model.width * travelling
    if ring == 1 or each > limit:
        return 0
    if chip is None:
        return 2 * each
    kept = 0
    for op, x, w in products_of_a_layer(model, batch=batch, length=length, ring=ring):
        if op == "all_gather_matmul":
            options = {
                "itemsize": computed,
                "gathered_bytes": limit,
                "quantization": quantization_of(model),
            }
            plan = fa.plan(op, x, w, chip=chip, ring=ring, **options)
            kept += plan.costs.get(config.backend, plan.costs[plan.backend]).kept
    return kept


def _parameters_outside(model: TransformerConfig) -> int:
    """Returns the number of elements in the embedding and, if it is not tied to that, the output
    projection.
    """
    return model.vocab_size * model.width * (1 if model.tie_embeddings else 2)


def _layer(
    config: Config, chip: Chip, batch: int, length: int, context: int, ring: int
) -> tuple[float, float, float]:
    """Returns the seconds of work of one layer, forward and backward, and its waits over the model
    and context axes.
    """
    model = config.model
    heads, kv_heads = local_heads(model, ring)
    width = model.width
    hidden = hidden_of_a_token(model) // ring
    rows = length // ring
    repeated = POLICIES[model.remat or "none"].repeats
    bytes_each: dict[str, Any] = {"itemsize": _BYTES[model.dtype]}
    quantized = {"quantization": quantization_of(model)}
    work = wait = 0.0
    products: list[tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]]] = []
    for op, x, w in products_of_a_layer(model, batch=batch, length=length, ring=ring):
        limit = {"gathered_bytes": model.gathered_mib * 2**20} if op == "all_gather_matmul" else {}
        products.append((op, (x, w), bytes_each | quantized | limit))
    if model.experts:
        products.append(
            (
                "expert_mlp",
                experts_of_a_layer(model, batch=batch, length=length, ring=ring),
                bytes_each,
            )
        )
    for op, shapes, asked in products:
        for backward in (True, False)[: 1 + ("matmuls" in repeated)]:
            busy, waiting = _cost(
                chip, ring, op, shapes, config.backend, backward=backward, **asked
            )
            work = work + busy
            wait = wait + waiting
    q, k = ((batch, length, number, model.head_features) for number in (heads, kv_heads))
    options = bytes_each | ({"layout": config.mesh.context_layout} if context > 1 else {})
    context_wait = 0.0
    for backward in (True, False)[: 1 + ("attention" in repeated)]:
        busy, waiting = _cost(
            chip, context, "ring_attention", (q, k), config.backend, backward=backward, **options
        )
        work = work + busy
        context_wait = context_wait + waiting
    moved = (
        batch * (ROWS_MOVED * rows * width + HIDDEN_MOVED * length * hidden) * _BYTES[model.dtype]
    )
    return work + (3 + ("passes" in repeated)) * moved / hbm(chip), wait, context_wait


def _head(
    model: TransformerConfig, chip: Chip, batch: int, length: int, ring: int
) -> tuple[float, float]:
    """Returns the seconds of work of the output projection and the loss, and the wait over the
    model axis.
    """
    vocabulary = -(-model.vocab_size // ring)
    x = (batch, length // ring, model.width)
    w = (model.width, vocabulary)
    work, wait = _cost(
        chip, ring, "all_gather_matmul", (x, w), "auto", backward=True, itemsize=_BYTES[model.dtype]
    )
    moved = LOGITS_MOVED * 4 * batch * length * vocabulary
    return work + moved / hbm(chip), wait


@functools.lru_cache(maxsize=4096)
def _cost(
    chip: Chip,
    ring: int,
    op: str,
    shapes: tuple[tuple[int, ...], ...],
    backend: str,
    **options: Any,
) -> tuple[float, float]:
    """Returns the seconds in which an op works and waits, with the backend of the run, or else with
    the fastest one.
    """
    plan = fa.plan(op, *shapes, chip=chip, ring=ring, **options)
    cost = plan.costs.get(backend, plan.costs[plan.backend])
    exposed = cost.exposed if ring > 1 else 0.0  # one device waits for its own memory alone
    return cost.seconds - exposed, exposed
