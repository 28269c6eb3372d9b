"""How many links of a chip a collective uses at once, as the compiler notes beside it.

XLA for TPU divides the data of some collectives into `colors`. Each color goes around the
dimensions of the chip network one after another, and each begins with another dimension, so that
all dimensions are busy at once. A color uses both directions of a dimension, or one of them where
the name of the strategy says `UniDirection`. Examples of notes:

| note | links |
|---|---|
| `StrategyRing{colors:1 phases:1 cores:{16}` | one ring: no answer here |
| `StrategyND{colors:2 phases:2 cores:{16 16}` | both directions of two rings: 4 |
| `UniDirectionNDRingStrategy{colors:6 phases:3 cores:{8 8 8}` | one direction for each color: 6 |
| `3DAllGatherOnMajorDim` | both directions of three rings: 6; it is chosen where rings close |

A dimension that no link closes counts as one link: what is summed at one end crosses all of it.
"""

import functools
import re
from typing import NamedTuple

from flaxasync.hardware import CUBE, Chip

_STRATEGY = re.compile(
    r"(?P<name>\w*Strategy\w*)\{colors:(?P<colors>\d{1,2}) phases:(?P<phases>\d) "
    r"cores:\{(?P<sizes>\d{1,4}(?: \d{1,4})*)\}"
)
_GATHER = re.compile(r'"emitter":"([23])DAllGather')


class Torus(NamedTuple):
    """The links of a chip that a collective uses at once, and the hops of its longest way."""

    links: float
    hops: int


# a program has few kinds of collectives, and many of each
@functools.lru_cache(1024)
def torus_of(notes: str, group: int, chips: int, chip: Chip) -> Torus | None:
    """Returns what a collective uses by the compiler's notes beside it; None where it is one ring,
    or where nothing is noted.

    Args:
      notes: The `backend_config` of the collective, or of what it is in.
      group: The number of devices that take part in it.
      chips: That of the slice. The notes do not have its shape, so a dimension of whole cubes is
        taken to close if the slice has as many chips as some cubes.
      chip: Each of them.
    """
    gather = _GATHER.search(notes)
    if gather:
        # The sizes of the dimensions are not noted, and only matter to the hops.
        dimensions = int(gather[1])
        across = round(group ** (1 / dimensions))
        return Torus(2.0 * dimensions, dimensions * (across // 2))
    strategy = _STRATEGY.search(notes)
    if strategy is None or int(strategy["phases"]) < 2:
        return None
    sizes = [int(size) for size in strategy["sizes"].split()]
    busy = float(strategy["colors"])  # dimensions
    if "UniDirection" in strategy["name"]:
        busy /= 2
    links = 0
    hops = 0
    for size in sizes:
        if _closes(size, chips, chip):
            links += 2
            hops += size // 2
        else:
            links += 1
            hops += size - 1
    return Torus(links * min(1.0, busy / len(sizes)), hops)


def _closes(size: int, chips: int, chip: Chip) -> bool:
    """Says whether a link closes a dimension of this size into a ring."""
    if chip.wraps_at == CUBE and chips % CUBE**3 != 0:
        return False
    return size % chip.wraps_at == 0
