"""What each device knows about the progress of the others, as vector clocks.

The progress of a device is the number of instructions that it has entered. Signals and transfers carry what their
sender knows. A kernel that writes into another device must know that the other one has entered the same kernel. If it
does not, the write is a race, even if the timing of this simulation happens to be harmless. Devices that take different
branches of a program have entered different numbers of instructions when they are in the same one.
"""

from collections import defaultdict
from collections.abc import Sequence

type Progress = list[int]  # for each device, the number of instructions that it is known to have entered


class VectorClocks:
    """The clocks of all devices."""

    def __init__(self, devices: int):
        self._known: list[Progress] = [[0] * devices for _ in range(devices)]
        self._entered: list[dict[str, list[int]]] = [defaultdict(list) for _ in range(devices)]

    def enter(self, device: int, instruction: str) -> None:
        """Counts that a device enters its next instruction."""
        self._known[device][device] += 1
        self._entered[device][instruction].append(self._known[device][device])

    def known_to(self, device: int) -> Progress:
        """Returns what a device knows at this moment, for a message to carry."""
        return list(self._known[device])

    def learn(self, device: int, message: Progress) -> None:
        """Adds to what a device knows the message that it received."""
        known = self._known[device]
        known[:] = map(max, known, message)

    def synchronize(self, devices: Sequence[int]) -> None:
        """Lets each of some devices know what any of them knows, because they have met in a collective."""
        everything = [max(values) for values in zip(*(self._known[d] for d in devices), strict=True)]
        for device in devices:
            self._known[device] = list(everything)

    def knows_to_have_entered(self, device: int, other: int, instruction: str) -> bool:
        """Says whether a device knows that another one has entered the instruction that it is in itself.

        Where the device has entered it several times, the other one must have entered it as often.
        """
        times, others = len(self._entered[device][instruction]), self._entered[other][instruction]
        return len(others) >= times and self._known[device][other] >= others[times - 1]
