"""The errors of the player: a dump that cannot be read, or a program that breaks a rule of the machine.

Every message says where the fault is, in the dump and where possible in the Python source, and what to do.
"""

import dataclasses


class PlayerError(ValueError):
    """A dump cannot be simulated. This is the base class of all errors of the player."""


class DumpError(PlayerError):
    """The folder does not hold exactly one complete dump, in a version that the player can read."""


class UnknownOperationError(PlayerError, NotImplementedError):
    """The program contains an operation whose meaning or cost the player does not know."""


class MeshMismatchError(PlayerError):
    """The program was compiled for another number or another order of devices."""


class ProtocolError(PlayerError):
    """The program breaks a rule of the machine. On a TPU it would hang, halt or corrupt memory."""


class OutOfBoundsError(ProtocolError):
    """A transfer leaves the buffer in which it begins."""


class LeftoverSemaphoreError(ProtocolError):
    """A kernel ends with a semaphore that is not zero."""


class RaceError(ProtocolError):
    """Memory is written while a transfer still reads or writes it."""


class HaltError(ProtocolError):
    """The program stops itself, because one of its own checks failed."""


@dataclasses.dataclass(frozen=True)
class Blocked:
    """Where one device waits forever.

    Attributes:
      device: The number of the device.
      kernel: The instruction of the program that the device is in.
      semaphore: The name of the semaphore that it waits for.
      value: The value of the semaphore.
      needed: The value that it waits for, in words.
      comment: The compiler's comment on the wait; "" if it has none.
      location: The file and line of the dump.
      source: "file:line" of the Python that made the operation; "" if the dump does not say.
    """

    device: int
    kernel: str
    semaphore: str
    value: int
    needed: str
    comment: str
    location: str
    source: str

    def __str__(self) -> str:
        why = f" ({self.comment})" if self.comment else ""
        source = f", made at {self.source}" if self.source else ""
        return (
            f"device {self.device} waits in {self.kernel} for {self.semaphore} {self.needed}{why}, "
            f"which is {self.value}; {self.location}{source}"
        )


class DeadlockError(ProtocolError):
    """Devices wait for something that no device will send.

    Attributes:
      blocked: For each device that has not ended, where it waits.
    """

    def __init__(self, blocked: tuple[Blocked, ...], finished: tuple[int, ...]):
        self.blocked = blocked
        done = f"; devices {', '.join(map(str, finished))} ran to the end" if finished else ""
        super().__init__("deadlock:\n  " + "\n  ".join(map(str, blocked)) + done)
