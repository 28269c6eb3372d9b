"""Tensor-parallel layers as `nnx.Module`s, on global arrays and the ambient mesh."""

from flaxasync.nn.attention import ParallelSelfAttention as ParallelSelfAttention
from flaxasync.nn.embed import VocabParallelEmbed as VocabParallelEmbed
from flaxasync.nn.embed import softmax_cross_entropy as softmax_cross_entropy
from flaxasync.nn.heads import rotary_embedding as rotary_embedding
from flaxasync.nn.linear import ColumnParallelLinear as ColumnParallelLinear
from flaxasync.nn.linear import RowParallelLinear as RowParallelLinear
from flaxasync.nn.mlp import ParallelMLP as ParallelMLP
from flaxasync.nn.options import LayerOptions as LayerOptions
from flaxasync.nn.options import LinearOptions as LinearOptions
from flaxasync.nn.ring_attention import RingSelfAttention as RingSelfAttention
