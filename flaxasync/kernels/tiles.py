from flaxasync.kernels.engine.grid import split as split
from flaxasync.kernels.engine.operands import DTYPES as DTYPES
from flaxasync.kernels.engine.operands import LANES as LANES
from flaxasync.kernels.engine.operands import Tiles as Tiles
from flaxasync.kernels.engine.operands import check_operand as check_operand
from flaxasync.kernels.engine.operands import largest_divisor
from flaxasync.kernels.engine.operands import sublanes as sublanes
from flaxasync.kernels.engine.vmem import MIB as MIB
from flaxasync.kernels.engine.vmem import RESERVED as RESERVED
from flaxasync.kernels.engine.vmem import check_vmem as check_vmem
from flaxasync.kernels.engine.vmem import chip_in_use as chip_in_use
from flaxasync.kernels.engine.vmem import fitting as fitting
from flaxasync.kernels.engine.vmem import vmem_limit as vmem_limit

largest_side = largest_divisor
