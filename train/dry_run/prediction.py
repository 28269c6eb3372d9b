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
from collections.abc import Mapping

from flaxasync.check.estimate.costs import collective_seconds
from flaxasync.hardware import Chip
from flaxasync.ops.roofline import Cost, hbm
from models.config import FsdpOverlap, Remat
from train.config import Config, replace_options
from train.dry_run.device_share import BYTES, CONTEXT_WAIT, MODEL_WAIT, DeviceShare, OpCall
from train.dry_run.memory import layer_values, predicted_memory
from train.step.mesh import AXES
from train.step.products import hidden_of_a_token

# How many times a device moves values through HBM. The backward pass of a layer moves twice what
# its forward pass does.
ROWS_MOVED = 8  # rows of the residual stream: norms, rotary positions and residuals; fitted
HIDDEN_MOVED = 2  # the hidden features of the MLP, in a layer; fitted
# float32 logits: XLA writes those of a block once and reads them three times, on v6e
LOGITS_MOVED = 4
ROOM = 0.95  # share of the memory that a form may need if there is one that needs less


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A form of the step on a mesh, and what it is predicted to take, in seconds and in bytes of a
    device.
    """

    config: Config  # that of the run, whose form is complete
    sizes: Mapping[str, int]  # of all four axes of the mesh
    memory: Mapping[str, int]  # by use
    work: float  # time in which the core works
    # time in which the core waits for other devices or the host, by the axis and the transfer
    waits: Mapping[str, float]
    available: int  # memory that programs can use

    @property
    def needed(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def has_room(self) -> bool:
        return self.needed <= ROOM * self.available

    @property
    def exposed(self) -> float:
        return sum(self.waits.values())

    @property
    def seconds(self) -> float:
        return self.work + self.exposed


def mesh_options(sizes: Mapping[str, int]) -> str:
    """Returns the options of the command line that name a mesh."""
    return " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())


def form_options(config: Config) -> str:
    """Returns the options of the command line that name the form of a run."""
    model = config.model
    text = f"--model.remat {model.remat} --model.fsdp_overlap {model.fsdp_overlap}"
    if model.gathered_mib:
        text += f" --model.gathered_mib {model.gathered_mib}"
    return text


def with_form(config: Config, remat: Remat | None, overlap: FsdpOverlap | None) -> Config:
    return replace_options(config, {"model.remat": remat, "model.fsdp_overlap": overlap})


@dataclasses.dataclass
class _Ops:
    """The seconds of ops on a device, added up."""

    work: float
    waits: dict[str, float]  # by the axis and the transfer

    def add(self, call: OpCall, cost: Cost, times: int) -> None:
        wait = 0.0  # one device waits for its own memory alone
        if call.ring > 1:
            wait = cost.exposed
        self.work += times * (cost.seconds - wait)
        self.waits[call.waits_for] += times * wait


def predict(config: Config, chip: Chip, mesh: Mapping[str, int]) -> Prediction:
    """Predicts a step of a run on a mesh that it divides over; of the run's own mesh only
    `context_layout` is read.
    """
    model = config.model
    config = with_form(config, model.remat or "none", model.fsdp_overlap or "xla")
    here = DeviceShare.of(config, chip, mesh)
    memory = predicted_memory(here)
    ops = _Ops(0.0, {MODEL_WAIT: 0.0, CONTEXT_WAIT: 0.0})
    crossings = 3  # of HBM by what a layer moves: once forward, twice backward
    if "passes" in here.policy.repeats:
        crossings = 4
    for call in here.layer_calls():
        ops.add(call, here.cost(call), model.layers)
        if call.makes in here.policy.repeats:
            ops.add(call, here.cost(call, backward=False), model.layers)
    stream = here.rows / here.ring * model.width
    hidden = here.rows * hidden_of_a_token(model) / here.ring
    layer_moves = (ROWS_MOVED * stream + HIDDEN_MOVED * hidden) * here.computed
    ops.work += model.layers * crossings * layer_moves / hbm(chip)
    # what transfers of parameters and of activations can hide behind
    layers_work = ops.work
    output = here.output_call()
    ops.add(output, here.cost(output), 1)
    waits = ops.waits | _parameter_waits(here, layers_work)
    waits["host: activations"] = _host_wait(here, layers_work)
    logits = LOGITS_MOVED * BYTES["float32"] * here.rows * here.vocabulary
    updated = memory["parameters"] + memory["optimizer state"] + memory["gradients"]
    microbatches = config.data.microbatches
    moved = microbatches * logits + 2 * updated  # read and written
    work = microbatches * ops.work + moved / hbm(chip)
    return Prediction(
        config=config,
        sizes={axis: mesh.get(axis, 1) for axis in AXES},
        memory=memory,
        work=work,
        waits={name: microbatches * seconds for name, seconds in waits.items()},
        available=round(chip.hbm_bytes),
    )


def _host_wait(here: DeviceShare, layers_work: float) -> float:
    """Returns how much longer than the layers work they exchange values with their host, once each
    way.
    """
    if not here.chip.host_bandwidth:
        return 0.0
    values = layer_values(here)
    offloaded = here.model.layers * sum(values[name] for name in here.policy.offloads)
    return max(0.0, 2 * offloaded / here.chip.host_bandwidth - layers_work)


def _parameter_waits(here: DeviceShare, layers_work: float) -> dict[str, float]:
    """Returns the waits for parameters and gradients in a micro-batch, whose layers work for so
    many seconds.
    """
    model = here.model
    embedding = _transfers(here, here.outside - here.output_size, "xla")
    output = _transfers(here, here.output_size, model.fsdp_overlap)
    layer = _transfers(here, here.kernels, model.fsdp_overlap)
    gather = 2 * layer.gather
    if not here.prefetches and "kernels" in here.policy.keeps:
        gather = layer.gather
    if not here.prefetches and model.quantization is not None and not model.experts:
        gather /= here.computed  # in 8 bits
    fsdp = model.layers * (gather + layer.scatter) + output.gather + output.scatter
    data = model.layers * layer.reduce + output.reduce
    if here.prefetches and here.fsdp > 1:
        fsdp = layer.gather + layer.scatter + max(0.0, fsdp - layers_work)
    elif here.prefetches:
        data = max(0.0, data - layers_work)
    fsdp += embedding.gather + embedding.scatter
    return {"fsdp: weights and gradients": fsdp, "data: gradients": data + embedding.reduce}


@dataclasses.dataclass(frozen=True)
class _Transfers:
    """Seconds of the transfers of some kernels."""

    gather: float  # over fsdp
    scatter: float  # of the gradients over fsdp
    reduce: float  # of the gradients' shards over data and context


def _transfers(here: DeviceShare, parameters: int, overlap: FsdpOverlap | None) -> _Transfers:
    """Returns the times of so many parameters.

    Direct copies send R^2 / 8 blocks over a link where a ring sends (R - 1) / 2, and gradients as
    they are made.
    """
    chip = here.chip
    whole = parameters / here.ring
    gradient = int(whole * here.stored)
    longer = 1.0
    if overlap == "prefetch_pallas" and here.fsdp > 1:
        gradient = int(whole * here.computed)
        longer = here.fsdp**2 / (4 * (here.fsdp - 1))
    shard = int(whole / here.fsdp * here.stored)
    gather = collective_seconds("all-gather", 0, int(whole * here.computed), here.fsdp, chip)
    scatter = collective_seconds("reduce-scatter", gradient, 0, here.fsdp, chip)
    reduce = collective_seconds("all-reduce", shard, shard, here.others, chip)
    return _Transfers(longer * gather, longer * scatter, reduce)
