"""Predicts the time of a training step on a mesh, from the sizes of model and mesh alone.

Nothing is traced or compiled, so that all meshes of a topology can be ranked in a second. The
prediction ranks meshes. It does not replace `--dry-run`, which compiles the step.

```
rows of a device    b = batch / (data x fsdp x micro-batches) sequences of L / context tokens
ops of a layer      by the costs of `flaxasync.plan`: products over the model axis, attention over
                    the context axis if there is one
fsdp                each kernel gathered forward, and backward if it is not kept; each gradient
                    reduce-scattered
data, context       each gradient all-reduced, at its share of the parameters
memory of the host  what a policy offloads, beside the work of a layer; nothing where the rate of
                    PCIe is unknown
optimizer           state and gradients cross HBM
```

Transfers over fsdp and data take the time of `flaxasync.check`'s model of a ring on idle links.
XLA's hold the core: in the compiled step of the preset llama_8b all of its collectives over these
axes are synchronous, on v5e as well. A scan that prefetches hides those of layers and output
projection behind the work of layers, but for the first gather and the last reduce-scatter.
Constants that are called fitted were chosen by the time that `flaxasync.check` estimates for this
step on v5e:4x4.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from flaxasync.check.estimate.costs import collective_seconds
from flaxasync.hardware import Chip
from flaxasync.ops.roofline import hbm
from models.config import FsdpOverlap, Remat
from train.config import Config
from train.dry_run.device_share import BYTES, DeviceShare, cost_of
from train.dry_run.memory import POLICIES, layer_values, predicted_memory
from train.step.mesh import AXES
from train.step.products import hidden_of_a_token, model_flops_per_token

# How many times a device moves values through HBM. The backward pass of a layer moves twice what
# its forward pass does.
ROWS_MOVED = 8  # rows of the residual stream: norms, rotary positions and residuals; fitted
HIDDEN_MOVED = 2  # the hidden features of the MLP, in a layer; fitted
# float32 logits: XLA writes those of a block once and reads them three times, on v6e
LOGITS_MOVED = 4
# what a scan that prefetches by permutes sends: blocks are cut out, added and written; fitted
UPDATES_MOVED = 7.5


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A form of the step on a mesh, and what it is predicted to take, in seconds and in bytes of a
    device.
    """

    mesh: Mapping[str, int]
    remat: Remat
    overlap: FsdpOverlap
    gathered_mib: int | None  # the most that a product keeps of the rows that it gathers
    memory: Mapping[str, int]  # by use
    work: float  # time in which the core works
    # time in which the core waits for other devices or the host, by the axis and the transfer
    waits: Mapping[str, float]
    mfu: float  # model FLOPs utilization, 0 to 1
    available: int  # memory that programs can use

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all four axes, of which `mesh` may lack those of one device."""
        return {axis: self.mesh.get(axis, 1) for axis in AXES}

    @property
    def mesh_options(self) -> str:
        """The options of the command line that name the mesh."""
        return " ".join(f"--mesh.{axis} {size}" for axis, size in self.sizes.items())

    @property
    def form(self) -> str:
        """The options of the command line that name the form."""
        kept = ""
        if self.gathered_mib:
            kept = f" --model.gathered_mib {self.gathered_mib}"
        return f"--model.remat {self.remat} --model.fsdp_overlap {self.overlap}{kept}"

    @property
    def options(self) -> str:
        """The options of the command line that name the mesh and the form."""
        return f"{self.mesh_options} {self.form}"

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
        return max(self.waits, key=self.waits.__getitem__)


class LayerTimes(NamedTuple):
    """Seconds of one layer, forward and backward."""

    work: float
    model_wait: float
    context_wait: float


class ParameterTimes(NamedTuple):
    """Seconds that a device waits for parameters and gradients in a micro-batch, and bytes."""

    fsdp: float
    data: float
    moved: float = 0.0  # bytes that permutes move through HBM


class Transfers(NamedTuple):
    """Seconds of the transfers of some kernels."""

    gather: float  # over fsdp
    scatter: float  # of the gradients over fsdp
    reduce: float  # of the gradients' shards over data


def predict(config: Config, chip: Chip, mesh: Mapping[str, int]) -> Prediction:
    """Predicts a step of a run on a mesh that it divides over; of the run's own mesh only
    `context_layout` is read.
    """
    model = config.model
    microbatches = config.data.microbatches
    here = DeviceShare.of(config, mesh)
    layer = _layer_times(here, chip)
    parameters = _parameter_times(here, chip, model.layers * layer.work)
    memory = predicted_memory(config, mesh, chip)
    output = cost_of(chip, here.output_call(), "auto")
    output_wait = _wait(output.exposed, here.ring)
    logits = LOGITS_MOVED * BYTES["float32"] * here.rows * here.vocabulary
    updated = memory["parameters"] + memory["optimizer state"] + memory["gradients"]
    moved = microbatches * (logits + parameters.moved) + 2 * updated  # read and written
    computing = model.layers * layer.work + output.seconds - output_wait
    work = microbatches * computing + moved / hbm(chip)
    waits = {
        "model: activations": microbatches * (model.layers * layer.model_wait + output_wait),
        "context: keys and values": microbatches * model.layers * layer.context_wait,
        "fsdp: weights and gradients": microbatches * parameters.fsdp,
        "data: gradients": microbatches * parameters.data,
        "host: activations": microbatches * model.layers * _host_wait(here, chip, layer.work),
    }
    length = config.data.sequence_length
    flops = config.data.batch_size * length * model_flops_per_token(model, length)
    peak = math.prod(mesh.values()) * chip.flops
    remat = model.remat or "none"
    overlap = model.fsdp_overlap or "xla"
    mfu = flops / ((work + sum(waits.values())) * peak)
    return Prediction(
        mesh=dict(mesh),
        remat=remat,
        overlap=overlap,
        gathered_mib=model.gathered_mib,
        memory=memory,
        work=work,
        waits=waits,
        mfu=mfu,
        available=round(chip.hbm_bytes),
    )


def _wait(exposed: float, ring: int) -> float:
    """Returns the wait of an op for other devices: one device waits for its own memory alone."""
    if ring == 1:
        return 0.0
    return exposed


def _layer_times(here: DeviceShare, chip: Chip) -> LayerTimes:
    model = here.model
    repeated = POLICIES[model.remat or "none"].repeats
    work = 0.0
    waits = {True: 0.0, False: 0.0}  # by whether it is attention, over context
    for call in here.layer_calls():
        passes = [True]
        if call.makes in repeated:
            passes.append(False)
        for backward in passes:
            cost = cost_of(chip, call, here.config.backend, backward=backward)
            wait = _wait(cost.exposed, call.ring)
            work += cost.seconds - wait
            waits[call.is_attention] += wait
    stream = here.rows / here.ring * model.width
    hidden = here.rows * hidden_of_a_token(model) / here.ring
    moved = (ROWS_MOVED * stream + HIDDEN_MOVED * hidden) * here.computed
    passes_over_memory = 3 + ("passes" in repeated)
    return LayerTimes(work + passes_over_memory * moved / hbm(chip), waits[False], waits[True])


def _host_wait(here: DeviceShare, chip: Chip, work: float) -> float:
    """Returns how much longer than a layer works it exchanges values with its host, once each
    way.
    """
    if not chip.host_bandwidth:
        return 0.0
    values = layer_values(here, chip)
    offloads = POLICIES[here.model.remat or "none"].offloads
    offloaded = sum(values[name] for name in offloads)
    return max(0.0, 2 * offloaded / chip.host_bandwidth - work)


def _parameter_times(here: DeviceShare, chip: Chip, work: float) -> ParameterTimes:
    """Returns the waits beside layers that together work for so many seconds."""
    model = here.model
    layers = model.layers
    if model.fsdp_overlap in (None, "xla"):
        travels = here.computed
        if model.quantization is not None and not model.experts:
            travels = 1
        outside = _transfers(here, chip, here.outside)
        layer = _transfers(here, chip, here.kernels, itemsize=travels)
        gathers = 2
        if "kernels" in POLICIES[model.remat or "none"].keeps:
            gathers = 1
        fsdp = outside.gather + outside.scatter + layers * (gathers * layer.gather + layer.scatter)
        return ParameterTimes(fsdp, outside.reduce + layers * layer.reduce)

    direct = model.fsdp_overlap == "prefetch_pallas"
    output_size = 0
    if not model.tie_embeddings:
        output_size = here.outside // 2
    embedding = _transfers(here, chip, here.outside - output_size)
    output = _transfers(here, chip, output_size, direct=direct)
    layer = _transfers(here, chip, here.kernels, direct=direct)
    # two devices exchange whole gradients and cut nothing
    cuts = not direct and (here.fsdp > 1 or here.others != 2)
    moved = 0.0
    if cuts:
        sent = (layers * here.kernels + output_size) / here.ring
        moved = UPDATES_MOVED * sent * (2 * here.computed + here.stored)
    reduce = layers * layer.reduce + output.reduce
    if here.fsdp == 1:
        return ParameterTimes(0.0, embedding.reduce + max(0.0, reduce - work), moved)
    beside_work = layers * (2 * layer.gather + layer.scatter) + output.gather + output.scatter
    first_and_last = embedding.gather + embedding.scatter + layer.gather + layer.scatter
    fsdp = first_and_last + max(0.0, beside_work - work)
    return ParameterTimes(fsdp, embedding.reduce + reduce, moved)


def _transfers(
    here: DeviceShare,
    chip: Chip,
    parameters: int,
    *,
    direct: bool = False,
    itemsize: int | None = None,
) -> Transfers:
    """Returns the times of so many parameters, which travel with `itemsize` bytes when they are
    gathered.

    Direct copies send R^2 / 8 blocks over a link where a ring sends (R - 1) / 2, and gradients as
    they are made.
    """
    whole = parameters / here.ring
    gathered = int(whole * (itemsize or here.computed))
    gradient = int(whole * here.stored)
    longer = 1.0
    if direct:
        gradient = int(whole * here.computed)
        longer = here.fsdp**2 / (4 * (here.fsdp - 1))
    shard = int(whole / here.fsdp * here.stored)
    gather = collective_seconds("all-gather", 0, gathered, here.fsdp, chip)
    scatter = collective_seconds("reduce-scatter", gradient, 0, here.fsdp, chip)
    reduce = collective_seconds("all-reduce", shard, shard, here.others, chip)
    return Transfers(longer * gather, longer * scatter, reduce)
