"""The devices of a simulation, and how a program addresses them."""

from flaxasync.check.player.basic_blocks import Code
from flaxasync.check.player.chip_grid import ChipGrid
from flaxasync.check.player.diagnostics import Diagnostics
from flaxasync.check.player.launch import Launch
from flaxasync.check.player.machine import Machine


class Devices:
    """All devices of a simulation.

    Attributes:
      machines: The devices, in the order of the partitions.
    """

    def __init__(self, launch: Launch, grid: ChipGrid, top: Code, diagnostics: Diagnostics):
        self.machines = [launch.machine(device, top) for device in range(len(launch.chips))]
        self._grid, self._diagnostics = grid, diagnostics
        self._by_number = {m.chip_id * grid.cores + m.core: m for m in self.machines}

    def addressed(self, chip: int, core: int, sender: Machine) -> Machine:
        """Returns the device that a program addresses by chip and core.

        Raises:
          PlayerError: The topology does not have this chip.
        """
        number = chip * self._grid.cores + core % self._grid.cores
        if number not in self._by_number:
            raise self._diagnostics.no_such_chip(sender, chip, self._grid.name)
        return self._by_number[number]
