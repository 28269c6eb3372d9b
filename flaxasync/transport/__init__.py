"""Moves one block to a neighbour: a start begins the transfer, compute runs meanwhile, and a done
waits for the end.

The pairs of a start and a done are public (`flaxasync.ppermute_start`, `flaxasync.ppermute_done`
and others). Every ring uses the same transfers through the implementations of
`flaxasync.ring.Transport`.

```
permute    the public permute on values, and the table from the names of backends to transports
xla        the transport on `lax.ppermute`
pallas     the transport on value futures
stateful   the transport on Refs, and the public permute on Refs
slots      the public permute between the two slots of one Ref
pair       makes a start and a done from two kernel bodies
local      copies within a device
direct     an all-gather and an all-to-all in which each device sends to all others
counted_rows  as many rows of a block as there are, to one other device
transfers  gathers of shards and reduce-scatters along a dimension, by permutes or by direct copies
schedule   keeps compute between a start and its done
```
"""

from flaxasync.transport.local import copy_done as copy_done
from flaxasync.transport.local import copy_start as copy_start
from flaxasync.transport.local import slice_done as slice_done
from flaxasync.transport.local import slice_start as slice_start
from flaxasync.transport.pair import Future as Future
from flaxasync.transport.pair import Pair as Pair
from flaxasync.transport.pair import done_kernel as done_kernel
from flaxasync.transport.pair import start_kernel as start_kernel
from flaxasync.transport.permute import TRANSPORTS as TRANSPORTS
from flaxasync.transport.permute import PendingPermute as PendingPermute
from flaxasync.transport.permute import ppermute as ppermute
from flaxasync.transport.permute import ppermute_done as ppermute_done
from flaxasync.transport.permute import ppermute_start as ppermute_start
from flaxasync.transport.schedule import tie as tie
from flaxasync.transport.schedule import while_travelling as while_travelling
from flaxasync.transport.slots import ppermute_done_slots as ppermute_done_slots
from flaxasync.transport.slots import ppermute_start_slots as ppermute_start_slots
from flaxasync.transport.stateful import ppermute_done_stateful as ppermute_done_stateful
from flaxasync.transport.stateful import ppermute_start_stateful as ppermute_start_stateful
from flaxasync.transport.stateful import tie_refs as tie_refs
