"""The player: simulates a compiled TPU program cycle by cycle, for all devices of its mesh, on a
machine without a TPU.

Each file imports only files that are listed above it or beside it:

  errors, bundle_text, chips, memory, routing           the text of programs; the chips, and the memory of one
  scalar_operations, matrix_unit, basic_blocks          from a program to Python code that executes it
  collectives, dump, prepared                           XLA's collectives; from a folder of dumps to programs
  result, machine                                       one device: its record, and what it does
  network, state, semaphores, transfers, simulation     all devices together
  play, kernel_times, product_times                     the public functions; kernels and products one by one
"""

from flaxasync.check.player.chips import PLAYED_CHIPS as PLAYED_CHIPS
from flaxasync.check.player.chips import PlayedChip as PlayedChip
from flaxasync.check.player.chips import played_chip as played_chip
from flaxasync.check.player.errors import DeadlockError as DeadlockError
from flaxasync.check.player.errors import DumpError as DumpError
from flaxasync.check.player.errors import HaltError as HaltError
from flaxasync.check.player.errors import LeftoverSemaphoreError as LeftoverSemaphoreError
from flaxasync.check.player.errors import MeshMismatchError as MeshMismatchError
from flaxasync.check.player.errors import OutOfBoundsError as OutOfBoundsError
from flaxasync.check.player.errors import PlayerError as PlayerError
from flaxasync.check.player.errors import ProtocolError as ProtocolError
from flaxasync.check.player.errors import RaceError as RaceError
from flaxasync.check.player.errors import UnknownOperationError as UnknownOperationError
from flaxasync.check.player.errors import UnsimulatedError as UnsimulatedError
from flaxasync.check.player.play import play as play
from flaxasync.check.player.play import play_dump as play_dump
from flaxasync.check.player.result import Result as Result
