"""The kernel of the weight gradient of `fa.all_gather_matmul`."""

from flaxasync.kernels.weight_gradient.kernel import gather_weight_gradient as gather_weight_gradient
