"""What can be wrong with a dump, with a program, or with a run of it. Every message says where and what to do."""

import dataclasses


class PlayerError(ValueError):
    """Anything that keeps a dump from being played."""


class DumpError(PlayerError):
    """The folder is no whole dump of one program by a version that the player reads."""


class UnknownOperationError(PlayerError, NotImplementedError):
    """The program holds an operation whose meaning or cost the player does not know."""


class MeshMismatchError(PlayerError):
    """The program was compiled for another number or order of devices."""


class ProtocolError(PlayerError):
    """The compiled program breaks a rule of the machine: what would hang, halt or corrupt memory on a TPU."""


class OutOfBoundsError(ProtocolError):
    """A transfer leaves the buffer that it starts in."""


class LeftoverSemaphoreError(ProtocolError):
    """A kernel ends with a semaphore that is not zero."""


class RaceError(ProtocolError):
    """Memory is written while a transfer still reads or writes it."""


class HaltError(ProtocolError):
    """The program stops itself: one of its own checks failed."""


@dataclasses.dataclass(frozen=True)
class Blocked:
    """Where one device waits for ever."""

    device: int
    kernel: str
    semaphore: str
    value: int
    needed: str
    comment: str
    place: str  # file:line of the dump
    source: str  # file:line of the Python that made the operation, where the dump knows it

    def __str__(self) -> str:
        why = f" ({self.comment})" if self.comment else ""
        source = f", made at {self.source}" if self.source else ""
        return (
            f"device {self.device} waits in {self.kernel} for {self.semaphore} {self.needed}{why}, "
            f"which is {self.value}; {self.place}{source}"
        )


class DeadlockError(ProtocolError):
    """Devices wait for what nobody will send."""

    def __init__(self, blocked: tuple[Blocked, ...], finished: tuple[int, ...]):
        self.blocked = blocked
        done = f"; devices {', '.join(map(str, finished))} ran to the end" if finished else ""
        super().__init__("deadlock:\n  " + "\n  ".join(map(str, blocked)) + done)
