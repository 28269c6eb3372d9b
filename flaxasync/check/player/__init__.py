"""Plays a compiled TPU program on a machine without a TPU, cycle by cycle, for all devices of its mesh.

The floors, lowest first: bundle_text, dump (text -> programs); scalar_operations, matrix_unit, blocks, machine (a
program on one core); launch, network, transfers, mesh, verdicts (machines -> a mesh); recorder, result, picture (a run
-> what it tells); play (all of it).
"""

from flaxasync.check.player.chips import PLAYED_CHIPS as PLAYED_CHIPS
from flaxasync.check.player.chips import PlayedChip as PlayedChip
from flaxasync.check.player.chips import played_chip as played_chip
from flaxasync.check.player.errors import DeadlockError as DeadlockError
from flaxasync.check.player.errors import DumpError as DumpError
from flaxasync.check.player.errors import LeftoverSemaphoreError as LeftoverSemaphoreError
from flaxasync.check.player.errors import MeshMismatchError as MeshMismatchError
from flaxasync.check.player.errors import OutOfBoundsError as OutOfBoundsError
from flaxasync.check.player.errors import PlayerError as PlayerError
from flaxasync.check.player.errors import ProtocolError as ProtocolError
from flaxasync.check.player.errors import RaceError as RaceError
from flaxasync.check.player.errors import UnknownOperationError as UnknownOperationError
from flaxasync.check.player.play import play as play
from flaxasync.check.player.play import play_dump as play_dump
from flaxasync.check.player.result import Result as Result
