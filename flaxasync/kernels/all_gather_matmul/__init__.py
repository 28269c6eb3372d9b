"""The kernel of `fa.all_gather_matmul`.

`kernel` has the public function, and `blocks` the trips of x around the ring. There are two orders of work: `stream`,
where tiles of x come from HBM, and `resident`, where the gathered x stays in vector memory, with its `schedule`.
"""

from flaxasync.kernels.all_gather_matmul.kernel import all_gather_matmul as all_gather_matmul
