"""Tensor-parallel Flax NNX layers whose communication hides behind their matmuls."""

from flaxasync import check as check
from flaxasync import nn as nn
from flaxasync.ops.attention.api import attention as attention
from flaxasync.ops.attention.api import ring_attention as ring_attention
from flaxasync.ops.attention.layouts import sequence_order as sequence_order
from flaxasync.ops.matmul.api import all_gather_matmul as all_gather_matmul
from flaxasync.ops.matmul.api import matmul_all_reduce as matmul_all_reduce
from flaxasync.ops.matmul.api import matmul_reduce_scatter as matmul_reduce_scatter
from flaxasync.ops.mesh_matmul import mesh_matmul as mesh_matmul
from flaxasync.ops.plan import plan as plan
from flaxasync.transport import copy_done as copy_done
from flaxasync.transport import copy_start as copy_start
from flaxasync.transport import ppermute as ppermute
from flaxasync.transport import ppermute_done as ppermute_done
from flaxasync.transport import ppermute_done_stateful as ppermute_done_stateful
from flaxasync.transport import ppermute_start as ppermute_start
from flaxasync.transport import ppermute_start_stateful as ppermute_start_stateful
from flaxasync.transport import slice_done as slice_done
from flaxasync.transport import slice_start as slice_start
from flaxasync.transport import while_travelling as while_travelling
