"""How a run can end: the exit codes that a supervisor acts on, and the errors that end a run with one of them.

docs/operations.md says what a supervisor does after each code.
"""

COMPLETE = 0  # all steps are done, or there was nothing to do
BAD_INPUT = 2  # the command line, the data or the workdir cannot be used as they are; no checkpoint was changed
DIVERGED = 3  # the loss or the gradient is not finite, so that repeating the same steps does not help
OUT_OF_MEMORY = 4  # the devices or the host have too little memory for this configuration
STORAGE = 74  # EX_IOERR: the workdir cannot be written; checkpoints that were complete before are intact
RESTART = 75  # EX_TEMPFAIL: the run continues from its newest checkpoint when it is started again
INTERRUPTED = 130  # by Ctrl-C


class RunError(Exception):
    """An error that ends a run with one paragraph on standard error and an exit code, instead of a traceback."""

    exit_code = 1


class InputError(RunError, ValueError):
    """A mistake that the person who starts the run can correct."""

    exit_code = BAD_INPUT


class DivergedError(RunError, ArithmeticError):
    """A number of a step is not finite, or too many updates in a row were skipped."""

    exit_code = DIVERGED

    def __init__(self, step: int, cause: str, advice: str = ""):
        super().__init__(f"{cause} at step {step}{advice}")
        self.step, self.cause = step, cause


class OutOfMemoryError(RunError):
    """An allocation on a device or on the host failed."""

    exit_code = OUT_OF_MEMORY


class StorageError(RunError, OSError):
    """A checkpoint or the metrics could not be written, even after repeated attempts."""

    exit_code = STORAGE


class RestartError(RunError):
    """The run cannot go on in this process, but can be continued by a new one."""

    exit_code = RESTART
