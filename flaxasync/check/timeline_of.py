"""`timeline`: the estimate of `estimate/estimator.py`, for which the kernels and the matrix
products of a program may be simulated first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from flaxasync.check.compile.program import CompiledProgram
from flaxasync.check.estimate import estimator
from flaxasync.check.estimate.costs import KernelTime
from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.hlo.load import chip_of, module_of
from flaxasync.check.hlo.module import HloModule
from flaxasync.check.progress import progress
from flaxasync.check.tested_libtpu import installed_libtpu, untested
from flaxasync.hardware import CHIPS, is_gpu


def timeline(
    compiled: Any,
    chip: str | None = None,
    *,
    kernels: Mapping[str, float] | Literal["play"] | None = None,
    products: Mapping[str, float] | Literal["play"] | None = None,
    copies: str | None = None,
    say: Callable[[str], None] | None = None,
    integers: Callable[[str, tuple[int, ...]], Sequence[int] | None] = lambda kernel, shape: None,
) -> Timeline:
    """Estimates which instruction runs when, on each device.

    Args:
      compiled: A compiled program, its text, or a parsed module. It must be scheduled.
      chip: "v5e", "v6e", "v5p" or "tpu7x", or a GPU: "a100", "h100", "h200" or "b200"; the name of a
        topology will do, too. By default the program's own chip.
      kernels: Seconds of Pallas kernels, by name. The time of any other kernel is that of its own
        cost estimate at the chip's peak, and transfers within it take none. "play" simulates every
        distinct kernel once, by itself, which takes seconds for each; the times are kept in the
        user's cache folder. The program must then be one of `compile_for`.
      products: Seconds of matrix products, by the names of their instructions. Any other product
        takes the compiler's estimate of cycles, which may be much too long. "play" simulates the
        bundles of each distinct product, at every call, which takes seconds for each. The program
        must then be one of `compile_for(..., keep_dumps=folder)`, and the folder must still be
        there. Programs for tpu7x take the estimates, and say so in a note.
      copies: "cycles" takes the compiler's estimates of copies, which are far too long within
        vector memory. "bytes" times copies by the bytes that they move. "simulated" does so, too,
        but at the lower rate of simulated copies where a layout changes in vector memory. By
        default "simulated" where kernels are simulated, and "cycles" elsewhere, by which the
        compiler itself schedules.
      say: Is called with a line about each kernel or product that is simulated.
      integers: Says what integer operands of a simulated kernel are that the program does not
        determine, such as the sizes of groups: (name, shape) -> elements, or None to take 0.

    Returns:
      The timeline: `.seconds`, `.compute`, `.exposed`, `.devices`, `.flops`. `print` shows a table,
      which says what the times were taken from. `fa.check.save_picture` and `fa.check.save_trace`
      write it to files.

    Raises:
      ValueError: The chip is unknown or was not given, the program is not scheduled or has no text,
        or kernels or products are to be simulated and it does not have what is needed; or
        `products` names no instruction of the program.
      HloError: The text cannot be read.
    """
    for what, choice in (("kernels", kernels), ("products", products)):
        if isinstance(choice, str) and choice != "play":
            raise ValueError(f"{what} must be 'play', or seconds by name: got {choice!r}")
    if kernels == "play" and not isinstance(compiled, CompiledProgram):
        raise ValueError(
            "kernels='play' needs a program of flaxasync.check.compile_for: got "
            f"{type(compiled).__name__}; compile it "
            "so, or give kernels={name: seconds}"
        )
    of = chip or chip_of(compiled)
    if "play" in (kernels, products) and is_gpu(of):
        raise ValueError(f"only programs for TPUs can be simulated: got one for {of}")
    module = module_of(compiled)
    given: dict[str, float] = {}
    played: dict[str, KernelTime] = {}
    notes: list[str] = []
    if isinstance(products, str):
        times, lines = _play_products(compiled, module, say)
        played |= {name: KernelTime(seconds, 0.0) for name, seconds in times.items()}
        notes += lines
    elif products is not None:
        _check_names(products, module)
        given |= products
    if isinstance(kernels, str):
        # imports numpy, which the estimate does not need
        from flaxasync.check.player.kernel_times import kernel_times

        assert isinstance(compiled, CompiledProgram)
        with progress(f"simulating the kernels of {module.name}"):
            of_kernels, lines = kernel_times(compiled, module, say, integers)
        played |= of_kernels
        notes += lines
        copies = copies or "simulated"
    elif kernels is not None:
        given |= kernels
    return estimator.timeline(
        compiled,
        chip,
        kernels=given,
        copies=copies or "cycles",
        played=played,
        products_played=products == "play",
        notes=(*notes, *_versions(compiled)),
    )


def _check_names(products: Mapping[str, float], module: HloModule) -> None:
    known = {i.name for i in module.instructions}
    for name in products:
        if name not in known:
            raise ValueError(
                f"products must name instructions of the program: {module.name} has no {name!r}"
            )


def _play_products(
    compiled: Any, module: HloModule, say: Callable[[str], None] | None
) -> tuple[dict[str, float], tuple[str, ...]]:
    if not isinstance(compiled, CompiledProgram) or compiled.dumps is None:
        raise ValueError(
            "products='play' needs a program with its bundles: compile it with "
            "compile_for(..., keep_dumps=an empty folder), or give products={name: seconds}"
        )
    # imports the simulator, which the estimate does not need
    from flaxasync.check.player.product_times import product_times

    with progress(f"simulating the products of {module.name}"):
        return product_times(compiled, module, compiled.dumps, say)


def _versions(compiled: Any) -> tuple[str, ...]:
    """Returns a line about the version of libtpu that compiled a program, if it was not tested."""
    of_tpu = chip_of(compiled) in CHIPS
    if isinstance(compiled, CompiledProgram) and of_tpu:
        line = untested(compiled.libtpu)
    elif of_tpu:  # JAX compiled it in this process
        line = untested(installed_libtpu())
    else:  # a text does not say
        line = None
    if line is None:
        return ()
    return (line,)
