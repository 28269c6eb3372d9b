"""Moving one block to a neighbour: start the transfer, use the time, wait for it.

The pairs are public (`flaxasync.ppermute_start`, `flaxasync.ppermute_done` and their kin). The same transfers, as
implementations of `flaxasync.ring.Transport`, carry the ring of every collective matmul.

```
permute    the public permute on values, and the transport of each backend's name
xla        transport on `lax.ppermute`
pallas     transport on value futures
stateful   transport on Refs, and the public permute on Refs
values     what transports of values have in common: the channel
pair       a start and a done from two kernel bodies
local      copies within a device
schedule   keeping compute between a start and its done
```
"""

from flaxasync.transport.local import copy_done as copy_done
from flaxasync.transport.local import copy_start as copy_start
from flaxasync.transport.local import slice_done as slice_done
from flaxasync.transport.local import slice_start as slice_start
from flaxasync.transport.pair import Future as Future
from flaxasync.transport.pair import Pair as Pair
from flaxasync.transport.permute import TRANSPORTS as TRANSPORTS
from flaxasync.transport.permute import get as get
from flaxasync.transport.permute import ppermute as ppermute
from flaxasync.transport.permute import ppermute_done as ppermute_done
from flaxasync.transport.permute import ppermute_start as ppermute_start
from flaxasync.transport.schedule import tie as tie
from flaxasync.transport.schedule import while_travelling as while_travelling
from flaxasync.transport.stateful import done_slots as done_slots
from flaxasync.transport.stateful import new_slots as new_slots
from flaxasync.transport.stateful import ppermute_done_stateful as ppermute_done_stateful
from flaxasync.transport.stateful import ppermute_start_stateful as ppermute_start_stateful
from flaxasync.transport.stateful import start_slots as start_slots
from flaxasync.transport.stateful import tie_refs as tie_refs
