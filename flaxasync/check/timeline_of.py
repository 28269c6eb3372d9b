"""`timeline`: the estimate of `estimate/estimator.py`, for which the kernels of a program may be
simulated first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from flaxasync.check.compile.program import CompiledProgram
from flaxasync.check.estimate import estimator
from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.hlo.load import chip_of, module_of
from flaxasync.check.progress import progress
from flaxasync.check.tested_libtpu import installed_libtpu, untested


def timeline(
    compiled: Any,
    chip: str | None = None,
    *,
    kernels: Mapping[str, float] | Literal["play"] | None = None,
    copies: str | None = None,
    say: Callable[[str], None] | None = None,
    integers: Callable[[str, tuple[int, ...]], Sequence[int] | None] = lambda kernel, shape: None,
) -> Timeline:
    """Estimates which instruction runs when, on each device.

    Args:
      compiled: A compiled program, its text, or a parsed module. It must be scheduled.
      chip: "v5e", "v6e", "v5p" or "tpu7x"; the name of a topology will do, too. By default the
        program's own chip.
      kernels: Seconds of Pallas kernels, by name. The time of any other kernel is that of its own
        cost estimate at the chip's peak, and transfers within it take none. "play" simulates every
        distinct kernel once, by itself, which takes seconds for each; the times are kept in the
        user's cache folder. The program must then be one of `compile_for`.
      copies: "cycles" takes the compiler's estimates of copies, which are far too long within
        vector memory. "bytes" times copies by the bytes that they move. "simulated" does so, too,
        but at the lower rate of simulated copies where a layout changes in vector memory. By
        default "simulated" where kernels are simulated, and "cycles" elsewhere, by which the
        compiler itself schedules.
      say: Is called with a line about each kernel that is simulated.
      integers: Says what integer operands of a simulated kernel are that the program does not
        determine, such as the sizes of groups: (name, shape) -> elements, or None to take 0.

    Returns:
      The timeline: `.seconds`, `.compute`, `.exposed`, `.devices`, `.flops`. `print` shows a table,
      which says what the times were taken from. `fa.check.save_picture` and `fa.check.save_trace`
      write it to files.

    Raises:
      ValueError: The chip is unknown or was not given, the program is not scheduled or has no text,
        or kernels are to be simulated and it does not say for which chips it was compiled.
      HloError: The text cannot be read.
    """
    if kernels != "play":
        if isinstance(kernels, str):
            raise ValueError(f"kernels must be 'play', or seconds by name: got {kernels!r}")
        return estimator.timeline(
            compiled, chip, kernels=kernels, copies=copies or "cycles", notes=_versions(compiled)
        )
    if not isinstance(compiled, CompiledProgram):
        raise ValueError(
            "kernels='play' needs a program of flaxasync.check.compile_for: got "
            f"{type(compiled).__name__}; compile it "
            "so, or give kernels={name: seconds}"
        )
    # imports numpy, which the estimate does not need
    from flaxasync.check.player.kernels import kernel_times

    module = module_of(compiled)
    with progress(f"simulating the kernels of {module.name}"):
        played, notes = kernel_times(compiled, module, say, integers)
    notes = (*notes, *_versions(compiled))
    return estimator.timeline(
        compiled, chip, copies=copies or "simulated", played=played, notes=notes
    )


def _versions(compiled: Any) -> tuple[str, ...]:
    """Returns a line about the version of libtpu that compiled a program, if it was not tested."""
    if isinstance(compiled, CompiledProgram):
        line = untested(compiled.libtpu)
    elif chip_of(compiled) is not None:  # JAX compiled it in this process, for a TPU
        line = untested(installed_libtpu())
    else:  # a text does not say
        line = None
    if line is None:
        return ()
    return (line,)
