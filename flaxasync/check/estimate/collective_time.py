"""How long a collective takes on links that nothing else uses.

The model is a bandwidth-optimal ring. A group of two devices has one link; a larger group sends in both directions of
its ring at once. For large arrays XLA's own collectives are within a few percent of the model. The time of small
collectives is that of the hops.
"""

from flaxasync.hardware import Chip


def collective_seconds(opcode: str, bytes_in: int, bytes_out: int, group: int, chip: Chip) -> float:
    """Returns the seconds of a collective that is alone on its links.

    Args:
      opcode: The opcode of the collective.
      bytes_in: Bytes of one device's operand.
      bytes_out: Bytes of one device's result.
      group: R, the number of devices that take part.
      chip: The chip whose links carry the bytes.
    """
    if group < 2:
        return 0.0
    directions, share = 1 if group == 2 else 2, (group - 1) / group
    exchanged = bytes_in * (1 / 2 if group == 2 else group / 4)  # R/4 is the mean distance in a ring
    volumes = {  # the bytes that are sent, divided among the directions of the ring
        "all-gather": bytes_out * share,
        "reduce-scatter": bytes_in * share,
        "all-reduce": 2 * bytes_in * share,
        "all-to-all": exchanged,
        "ragged-all-to-all": exchanged,
        "collective-broadcast": bytes_in,
    }
    if opcode not in volumes:  # a collective-permute sends its operand in one direction
        return chip.hop_latency + bytes_in / chip.link_bandwidth
    hops = (group // 2 if directions == 2 else group - 1) * (2 if opcode == "all-reduce" else 1)
    return hops * chip.hop_latency + volumes[opcode] / (directions * chip.link_bandwidth)
