"""What one device has of a training step on a mesh: its rows, its operations, and the sizes that
its memory and its time are predicted from.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flaxasync as fa
from flaxasync.hardware import Chip
from flaxasync.ops.roofline import Cost
from models.config import TransformerConfig
from models.layer import quantization_of
from train.config import Config
from train.dry_run.policies import POLICIES, Policy
from train.step.mesh import CONTEXT, FSDP, batch_shards
from train.step.products import (
    experts_of_a_layer,
    local_heads,
    parameters_of_a_layer,
    products_of_a_layer,
)

BYTES = {"float32": 4, "bfloat16": 2}
MODEL_WAIT = "model: activations"
CONTEXT_WAIT = "context: keys and values"


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A call of an op on one device, as `flaxasync.plan` knows it."""

    # What the layer gets from it, by the names of `Policy`; "output" is what no gradient needs.
    makes: str
    op: str
    ring: int
    shapes: tuple[tuple[int, ...], ...]
    options: Mapping[str, Any]  # of the op; a call is therefore not hashable

    @property
    def waits_for(self) -> str:
        """What a device waits for in it: the axis and the transfer."""
        if self.op == "ring_attention":
            return CONTEXT_WAIT
        return MODEL_WAIT


@dataclasses.dataclass(frozen=True)
class DeviceShare:
    """The numbers of devices that share a step, and what each of them has in a micro-batch."""

    config: Config
    chip: Chip
    fsdp: int
    context: int
    ring: int  # devices of the model axis
    others: int  # devices with the same parameters: those of data and of context
    batch: int  # sequences
    length: int  # tokens of each that the device has
    kernels: int  # elements of the kernels of a layer, on all devices
    outside: int  # elements of the embedding and, unless tied, of the output projection
    computed: int  # bytes of an element in model.dtype
    stored: int  # bytes of an element in model.param_dtype

    @property
    def model(self) -> TransformerConfig:
        return self.config.model

    @property
    def prefetches(self) -> bool:
        """Whether a scan gathers weights ahead, into memory of its own."""
        overlap = self.model.fsdp_overlap
        return overlap == "prefetch" or (overlap == "prefetch_pallas" and self.fsdp > 1)

    @property
    def policy(self) -> Policy:
        return POLICIES[self.model.remat or "none"]

    @property
    def output_size(self) -> int:
        """The elements of the output projection, unless it is tied."""
        if self.model.tie_embeddings:
            return 0
        return self.outside // 2

    @property
    def rows(self) -> int:
        return self.batch * self.length

    @property
    def vocabulary(self) -> int:
        """The entries of the vocabulary, rounded up."""
        return -(-self.model.vocab_size // self.ring)

    @classmethod
    def of(cls, config: Config, chip: Chip, mesh: Mapping[str, int]) -> "DeviceShare":
        """Returns the share of a device of a mesh that the run divides over."""
        model = config.model
        context = mesh.get(CONTEXT, 1)
        vocabulary = model.vocab_size * model.width
        return cls(
            config,
            chip,
            fsdp=mesh.get(FSDP, 1),
            context=context,
            ring=mesh["model"],
            others=mesh["data"] * context,
            batch=config.data.batch_size // (batch_shards(mesh) * config.data.microbatches),
            length=config.data.sequence_length // context,
            kernels=parameters_of_a_layer(model),
            outside=vocabulary * (2 - model.tie_embeddings),
            computed=BYTES[model.dtype],
            stored=BYTES[model.param_dtype],
        )

    def layer_calls(self) -> list[OpCall]:
        """Returns the ops of one layer."""
        model = self.model
        sizes = {"batch": self.batch, "length": self.length, "ring": self.ring}
        last = "output"
        if model.post_norms:
            last = "added"
        made = ("operands", "added", "hidden", last)
        calls = []
        # a mixture without a shared expert has the first two products only
        for makes, (op, x, w) in zip(made, products_of_a_layer(model, **sizes), strict=False):
            options: dict[str, Any] = {"quantization": quantization_of(model)}
            if op == "all_gather_matmul":
                options["gathered_bytes"] = model.gathered_bytes
            calls.append(OpCall(makes, op, self.ring, (x, w), options))
        if model.experts:
            shapes = experts_of_a_layer(model, **sizes)
            calls.append(OpCall("hidden", "expert_mlp", self.ring, shapes, {}))
        layout = {}
        if self.context > 1:
            layout = {"layout": self.config.mesh.context_layout}
        shapes = tuple(
            (self.batch, self.length, heads, model.head_features)
            for heads in local_heads(model, self.ring)
        )
        calls.append(OpCall("attention", "ring_attention", self.context, shapes, layout))
        return calls

    def output_call(self) -> OpCall:
        """Returns the product of the output projection."""
        x = (self.batch, self.length // self.ring, self.model.width)
        w = (self.model.width, self.vocabulary)
        return OpCall("output", "all_gather_matmul", self.ring, (x, w), {})

    @property
    def bytes_of_rows(self) -> int:
        """The bytes of all rows of a layer's input, as a product gathers them."""
        itemsize = self.computed
        if self.model.quantization is not None:
            itemsize = 1
        return self.rows * self.model.width * itemsize

    @property
    def gathered_bytes(self) -> int:
        """The bytes of gathered rows that one layer keeps for its gradient."""
        return sum(self.cost(call).kept for call in self.layer_calls())

    def cost(self, call: OpCall, *, backward: bool = True) -> Cost:
        """Returns the cost of an op with the backend of the run, or else with the fastest one."""
        return _cost(
            self.chip,
            self.config.backend,
            call.op,
            call.shapes,
            ring=call.ring,
            itemsize=self.computed,
            backward=backward,
            **call.options,
        )


@functools.lru_cache(maxsize=8192)
def _cost(
    chip: Chip, backend: str, op: str, shapes: tuple[tuple[int, ...], ...], **options: Any
) -> Cost:
    plan = fa.plan(op, *shapes, chip=chip, **options)
    return plan.costs.get(backend, plan.costs[plan.backend])
