"""Tensor-parallel Flax NNX layers whose communication hides behind their matmuls.

Layers, as `nnx.Module`s on global arrays and the ambient mesh:

  nn.ColumnParallelLinear    Dense layer that splits output features; gathers rows meanwhile.
  nn.RowParallelLinear       Dense layer that splits input features; reduce-scatters meanwhile.
  nn.MeshLinear              Dense layer over two mesh axes: mesh_matmul as a layer.
  nn.ParallelMLP             MLP with split hidden features; gate and up share one gather.
  nn.ParallelMoE             Mixture of experts that rows visit; a drop-in for the MLP.
  nn.RouterOptions           How its router chooses experts.
  nn.Routing                 Losses and statistics of the choice.
  nn.ParallelSelfAttention   Self-attention with split heads; q, k and v share one gather.
  nn.ParallelAttention       The same for other keys and values, as nnx.MultiHeadAttention.
  nn.RingSelfAttention       Self-attention over a split sequence; keys and values travel.
  nn.VocabParallelEmbed      Embedding with a split vocabulary.
  nn.linear_cross_entropy    Loss of an output layer whose logits are never in memory at once.
  nn.softmax_cross_entropy   Loss of logits that stay split over the vocabulary.
  nn.rotary_embedding        Rotary position embedding of queries or keys.
  nn.RopeScaling             Scaling of its frequencies for longer sequences.
  nn.ColumnParallelProjections  Several column-parallel layers that share one gather of their input.
  nn.ParallelLoRA            Low-rank adaptation of a parallel Dense layer: the parallel nnx.LoRA.
  nn.scan_with_prefetch      Scan over layers that gathers the next layer's weights in advance.
  nn.parallelize             Replaces the layers of a model by parallel ones, by their paths.
  nn.Fused                   A rule of parallelize for several projections side by side.
  nn.Replaced                A layer that parallelize replaced.
  nn.load                    Puts plain arrays into a parallel model, by names, under its shardings.
  nn.Loaded                  What load did, name by name.
  nn.LayerOptions            Keywords that all layers share.
  nn.AttentionOptions        Keywords of attention layers.
  nn.ParallelAttentionOptions  Keywords of attention layers and of their Dense layers.
  nn.ExpertOptions           Keywords of a mixture of experts.
  nn.LinearOptions           Keywords of layers that are made of Dense layers.
  nn.MeshLinearOptions       Keywords of MeshLinear.

Ops on the local shards of a `jax.shard_map`:

  all_gather_matmul          Multiplies the gathered rows of all devices, each block as it arrives.
  matmul_reduce_scatter      Multiplies and sums over devices; each device ends with its own rows.
  matmul_all_reduce          Multiplies and sums over devices; each device ends with all rows.
  Quantization               How the matmuls of an op or a layer are quantised to 8 bits.
  save_matmuls               Policy of jax.checkpoint that keeps the results of matmuls.
  save_costly                Policy that also keeps the results of attention and gathered kernels.
  offload_operands           Policy that keeps on the host what attention reads.
  offload_most               Policy that keeps there what attention returns, too.
  mesh_matmul                Multiplies operands that split the contraction over two mesh axes.
  expert_mlp                 Applies to each row the experts that it chose, while rows travel.
  ring_attention             Exact attention over a sequence that is split over devices.
  attention                  The same attention over the rows of one device.
  sequence_order             Order in which a layout places the positions of a sequence.

Asynchronous transfers, as pairs of a start and a done:

  ppermute                   Sends a block to a neighbour on a ring, and waits for one.
  ppermute_start             Begins sending a block.
  ppermute_done              Waits for the block that arrives.
  ppermute_start_stateful    Begins sending what one Ref holds to another Ref of a neighbour.
  ppermute_done_stateful     Waits for both ends of such a transfer.
  ppermute_start_slots       Begins sending one slot of a Ref to the other slot of a neighbour.
  ppermute_done_slots        Waits for both ends of such a transfer.
  tie_refs                   Orders operations on Refs between a start and its done.
  copy_start                 Begins copying an array within a device.
  copy_done                  Waits for the copy.
  slice_start                Begins copying one row of an array within a device.
  slice_done                 Waits for the row.
  while_travelling           Runs a computation while a block travels, between a start and its done.

Meshes, choosing and checking:

  make_mesh                  Makes a mesh whose axes are rings of neighbouring chips.
  mesh_report                Reports how far apart neighbours on each axis of a mesh are.
  plan                       Predicts the time of each backend of an op on a chip, and chooses one.
  check                      Reads compiled TPU programs: overlap, hazards, time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxasync import check as check
    from flaxasync import nn as nn
    from flaxasync.mesh import make_mesh as make_mesh
    from flaxasync.mesh import mesh_report as mesh_report
    from flaxasync.ops.attention.api import attention as attention
    from flaxasync.ops.attention.api import ring_attention as ring_attention
    from flaxasync.ops.attention.layouts import sequence_order as sequence_order
    from flaxasync.ops.experts.api import expert_mlp as expert_mlp
    from flaxasync.ops.matmul.api import all_gather_matmul as all_gather_matmul
    from flaxasync.ops.matmul.api import matmul_all_reduce as matmul_all_reduce
    from flaxasync.ops.matmul.api import matmul_reduce_scatter as matmul_reduce_scatter
    from flaxasync.ops.mesh_matmul import mesh_matmul as mesh_matmul
    from flaxasync.ops.plan import plan as plan
    from flaxasync.ops.quantization import Quantization as Quantization
    from flaxasync.ops.saved import offload_most as offload_most
    from flaxasync.ops.saved import offload_operands as offload_operands
    from flaxasync.ops.saved import save_costly as save_costly
    from flaxasync.ops.saved import save_matmuls as save_matmuls
    from flaxasync.transport import copy_done as copy_done
    from flaxasync.transport import copy_start as copy_start
    from flaxasync.transport import ppermute as ppermute
    from flaxasync.transport import ppermute_done as ppermute_done
    from flaxasync.transport import ppermute_done_slots as ppermute_done_slots
    from flaxasync.transport import ppermute_done_stateful as ppermute_done_stateful
    from flaxasync.transport import ppermute_start as ppermute_start
    from flaxasync.transport import ppermute_start_slots as ppermute_start_slots
    from flaxasync.transport import ppermute_start_stateful as ppermute_start_stateful
    from flaxasync.transport import slice_done as slice_done
    from flaxasync.transport import slice_start as slice_start
    from flaxasync.transport import tie_refs as tie_refs
    from flaxasync.transport import while_travelling as while_travelling

__version__ = "0.1.0"

_HOMES = {
    "flaxasync.mesh": ("make_mesh", "mesh_report"),
    "flaxasync.ops.attention.api": ("attention", "ring_attention"),
    "flaxasync.ops.attention.layouts": ("sequence_order",),
    "flaxasync.ops.experts.api": ("expert_mlp",),
    "flaxasync.ops.matmul.api": ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"),
    "flaxasync.ops.mesh_matmul": ("mesh_matmul",),
    "flaxasync.ops.plan": ("plan",),
    "flaxasync.ops.quantization": ("Quantization",),
    "flaxasync.ops.saved": ("offload_most", "offload_operands", "save_costly", "save_matmuls"),
    "flaxasync.transport": (
        "copy_done",
        "copy_start",
        "ppermute",
        "ppermute_done",
        "ppermute_done_slots",
        "ppermute_done_stateful",
        "ppermute_start",
        "ppermute_start_slots",
        "ppermute_start_stateful",
        "slice_done",
        "slice_start",
        "tie_refs",
        "while_travelling",
    ),
}
"""The module of each public name. A module is imported when one of its names is first used, so that
`flaxasync.check` does not import the layers, and the layers do not import `flaxasync.check`."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = ["check", "nn", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name in ("check", "nn"):
        return importlib.import_module(f"flaxasync.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'flaxasync' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
