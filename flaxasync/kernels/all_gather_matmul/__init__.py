"""The kernel of `fa.all_gather_matmul`.

`kernel` has the public function, and `work` what it is asked to do. There are two orders of work. In `stream` tiles of
x come from HBM. In `resident` the gathered x stays in vector memory, and the products follow a static `schedule`.
"""

from flaxasync.kernels.all_gather_matmul.kernel import all_gather_matmul as all_gather_matmul
from flaxasync.kernels.all_gather_matmul.kernel import stays_resident as stays_resident
