"""The errors of the player. Every message says where the fault is, in the dump and if possible in
the Python source.
"""


class PlayerError(ValueError):
    """A dump cannot be simulated. This is the base class of all errors of the player."""


class DumpError(PlayerError):
    """The folder does not hold exactly one complete dump, in a version that the player can read."""


class UnsimulatedError(PlayerError, NotImplementedError):
    """The player cannot simulate the program, although nothing may be wrong with it. The message of
    `play` ends with an estimate.
    """


class UnknownOperationError(UnsimulatedError):
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


class DeadlockError(ProtocolError):
    """Devices wait for something that no device will send."""


def first_sentence(error: Exception) -> str:
    """Returns the first line of a message; also the second one, if the first one introduces a
    list.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0]
