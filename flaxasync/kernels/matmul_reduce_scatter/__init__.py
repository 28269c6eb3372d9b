"""The kernel of `fa.matmul_reduce_scatter`: `schedule` has the order of work, `kernel` what a device does."""

from flaxasync.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter as matmul_reduce_scatter
