"""Who talks to whom in a collective, read from its attributes, and how long the links need for it.

The times are those of bandwidth-optimal rings on links that nothing else uses: a group of two has one link, a larger
one sends both ways round. XLA's own collectives reach them within a few percent for large arrays; hops and latency
rule the small ones.
"""

import math
import re

from flaxasync.check.hlo.module import Instruction
from flaxasync.hardware import Chip

_AXIS = re.compile(r"'([^']+)'\s*=\s*(\d{1,9})")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIR = re.compile(r"\{\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")
MAX_DEVICES = 1 << 16


def permute_pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Returns the (source, target) pairs of a collective-permute."""
    return tuple((int(a), int(b)) for a, b in _PAIR.findall(instruction.attributes.get("source_target_pairs", "")))


def replica_groups(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that a collective joins; one group of all where the text names none.

    Reads lists ({{0,1},{2,3}}), iota ([2,4]<=[8]T(1,0)) and named axes (mesh['x'=2,'y'=4] {'y'}).
    """
    text = instruction.attributes.get("replica_groups", "")
    everyone = (tuple(range(devices)),)
    if match := _IOTA.search(text):
        groups = _iota_groups(match)
    elif text.startswith("mesh["):
        groups = _mesh_groups(text)
    else:
        lists = [tuple(int(n[:9]) for n in re.findall(r"\d+", part)) for part in re.findall(r"\{([\d,\s]+)\}", text)]
        groups = tuple(group for group in lists if group)
    return groups or everyone


def collective_seconds(opcode: str, bytes_in: int, bytes_out: int, group: int, chip: Chip) -> float:
    """Returns the time of a collective alone on its links.

    | opcode | bytes over each link direction |
    |---|---|
    | all-gather | (R-1)/R of the result |
    | reduce-scatter | (R-1)/R of the operand |
    | all-reduce | both of these |
    | all-to-all | R/4 of the operand: the mean distance in a ring |
    | collective-permute | the operand, one way |

    Args:
      opcode: which collective.
      bytes_in, bytes_out: of one device's operand and result.
      group: R, devices that take part.
      chip: whose links.
    """
    if group < 2:
        return 0.0
    ways = 1 if group == 2 else 2
    share = (group - 1) / group
    volumes = {
        "all-gather": bytes_out * share,
        "reduce-scatter": bytes_in * share,
        "all-reduce": 2 * bytes_in * share,
        "all-to-all": bytes_in * (1 / 2 if group == 2 else group / 4),
        "ragged-all-to-all": bytes_in * (1 / 2 if group == 2 else group / 4),
        "collective-broadcast": bytes_in,
    }
    if opcode not in volumes:
        return chip.hop_latency + bytes_in / chip.link_bandwidth
    hops = (group // 2 if ways == 2 else group - 1) * (2 if opcode == "all-reduce" else 1)
    return hops * chip.hop_latency + volumes[opcode] / (ways * chip.link_bandwidth)


def _iota_groups(match: re.Match) -> tuple[tuple[int, ...], ...]:
    shape, dims = ([int(n[:9]) for n in match[i].split(",") if n] for i in (1, 2))
    count = math.prod(dims)
    if not shape or count != math.prod(shape) or not 0 < count <= MAX_DEVICES:
        return ()
    order = [int(n[:9]) for n in (match[3] or "").split(",") if n] or list(range(len(dims)))
    if sorted(order) != list(range(len(dims))):
        return ()
    ids = _transposed_iota(dims, order)
    size = shape[-1]
    return tuple(tuple(ids[i : i + size]) for i in range(0, count, size))


def _mesh_groups(text: str) -> tuple[tuple[int, ...], ...]:
    inside, _, chosen = text.partition("]")
    axes = [(name, int(size)) for name, size in _AXIS.findall(inside)]
    wanted = re.findall(r"'([^']+)'", chosen)
    dims = [size for _, size in axes]
    count = math.prod(dims)
    if not axes or not wanted or "(" in chosen or not 0 < count <= MAX_DEVICES:
        return ()  # parts of an axis are not read
    last = [i for i, (name, _) in enumerate(axes) if name in wanted]
    first = [i for i in range(len(axes)) if i not in last]
    ids = _transposed_iota(dims, first + last)
    size = math.prod(dims[i] for i in last)
    return tuple(tuple(ids[i : i + size]) for i in range(0, count, size))


def _transposed_iota(dims: list[int], order: list[int]) -> list[int]:
    """Returns iota over `dims`, axes permuted to `order`, flat."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    ids = [0]
    for axis in order:
        ids = [base + k * strides[axis] for base in ids for k in range(dims[axis])]
    return ids
