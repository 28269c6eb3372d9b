"""The former home of the collective matmuls, for code that still imports them from here."""

from flaxasync.ops.matmul.api import all_gather_matmul as all_gather_matmul
from flaxasync.ops.matmul.api import matmul_all_reduce as matmul_all_reduce
from flaxasync.ops.matmul.api import matmul_reduce_scatter as matmul_reduce_scatter
