"""Tensor-parallel layers as `nnx.Module`s, on global arrays and the ambient mesh."""

from flaxasync.nn.adopt.loading import Loaded as Loaded
from flaxasync.nn.adopt.loading import load as load
from flaxasync.nn.adopt.parallelize import Replaced as Replaced
from flaxasync.nn.adopt.parallelize import parallelize as parallelize
from flaxasync.nn.adopt.products import ParallelLoRA as ParallelLoRA
from flaxasync.nn.adopt.products import parallel_dot_general as parallel_dot_general
from flaxasync.nn.attention.heads import AttentionOptions as AttentionOptions
from flaxasync.nn.attention.heads import ParallelAttentionOptions as ParallelAttentionOptions
from flaxasync.nn.attention.layer import ParallelAttention as ParallelAttention
from flaxasync.nn.attention.rotary import RopeScaling as RopeScaling
from flaxasync.nn.attention.rotary import rotary_embedding as rotary_embedding
from flaxasync.nn.attention.self_attention import ParallelSelfAttention as ParallelSelfAttention
from flaxasync.nn.attention.self_attention import RingSelfAttention as RingSelfAttention
from flaxasync.nn.embed import VocabParallelEmbed as VocabParallelEmbed
from flaxasync.nn.embed import softmax_cross_entropy as softmax_cross_entropy
from flaxasync.nn.linear import ColumnParallelLinear as ColumnParallelLinear
from flaxasync.nn.linear import ColumnParallelProjections as ColumnParallelProjections
from flaxasync.nn.linear import RowParallelLinear as RowParallelLinear
from flaxasync.nn.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from flaxasync.nn.mesh_linear import MeshLinear as MeshLinear
from flaxasync.nn.mesh_linear import MeshLinearOptions as MeshLinearOptions
from flaxasync.nn.mlp import ParallelMLP as ParallelMLP
from flaxasync.nn.options import LayerOptions as LayerOptions
from flaxasync.nn.options import LinearOptions as LinearOptions
from flaxasync.nn.prefetch import scan_with_prefetch as scan_with_prefetch
