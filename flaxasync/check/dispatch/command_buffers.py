"""The XLA flags with which a GPU runs while loops by itself, as conditional nodes of CUDA graphs.

XLA's default set of commands for command buffers contains neither WHILE nor CONDITIONAL, and XLA
makes no graphs of fewer than five commands. The host then reads the condition back before every
iteration (`while_thunk.cc` and `conditional_thunk.cc` in openxla/xla).

With CUDA 12.8 a loop works whose trip count is not known when it is compiled and that contains no
other loop. Loops of a known trip count, nested loops and optimizers such as L-BFGS, whose line
search is a loop within a loop, crash there and need 12.9 or later. JAX before 0.8.3 has the same
bug; this package needs a later one.
"""

import functools
import logging
import os
import subprocess
import sys
from typing import Literal, get_args

type LoopKind = Literal["dynamic", "static", "nested"]

# The plus signs add to XLA's set, where bare names would replace it. The second flag is there
# because a loop alone is one command.
_COMMANDS = "--xla_gpu_enable_command_buffer="
SMALL_GRAPHS = "--xla_gpu_graph_min_graph_size=1"
LOOPS = f"{_COMMANDS}+WHILE,+CONDITIONAL"
# The version of CUDA that each kind of loop needs, as CUDA numbers it. Branches were tried with
# 12.9 and later alone.
_NEEDED_CUDA = {"dynamic": 12080, "static": 12090, "nested": 12090}
_SECONDS = 120  # reading the flags takes one second; the rest allows for a busy machine


@functools.cache
def command_buffer_flags(loops: LoopKind = "nested") -> str:
    """Returns what to add to XLA_FLAGS, before JAX is first used, so that while loops stay on a
    GPU.

    Each flag is first tried in a process of its own, because XLA aborts on a name that it does not
    know. Whether a loop was captured can only be measured, with `measure_dispatch` on the GPU.

    Where JAX does not know the version of CUDA, a logged line says what it must be.

    Args:
      loops: The most that the program has: "dynamic" for loops without a known trip count that
        contain no loop, which CUDA 12.8 can run; "static" for loops with a known one, too; "nested"
        for any, such as those of L-BFGS.

    Raises:
      ValueError: There is no such kind of loop.
      NotImplementedError: CUDA is too old for such loops, or the installed jaxlib has no command
        buffers for loops.
    """
    suits, note = cuda_note(loops)
    if suits is False:
        raise NotImplementedError(
            f"{loops} while loops cannot be put into command buffers here: {note}"
        )
    if suits is None:
        logging.getLogger(__name__).warning("flaxasync: %s", note)
    if not _is_accepted(LOOPS):
        import jaxlib

        raise NotImplementedError(
            f"jaxlib {jaxlib.__version__} does not take {LOOPS}: its while loops cannot be put "
            "into command buffers; give loops a trip count that is known when they are compiled, "
            "or install another jaxlib"
        )
    if _is_accepted(SMALL_GRAPHS):
        return f"{LOOPS} {SMALL_GRAPHS}"
    return LOOPS


def flags_for(*commands: str) -> str:
    """Returns the flags that put these commands, WHILE and CONDITIONAL, into command buffers. They
    are not tried.
    """
    return f"{_COMMANDS}{','.join(f'+{command}' for command in commands)} {SMALL_GRAPHS}"


def cuda_note(loops: LoopKind = "nested") -> tuple[bool | None, str]:
    """Says whether the CUDA that JAX uses runs such loops in command buffers; None if its version
    is not known.
    """
    if loops not in _NEEDED_CUDA:
        kinds = ", ".join(get_args(LoopKind.__value__))
        raise ValueError(f"loops must be one of {kinds}: got {loops!r}")
    needed = _NEEDED_CUDA[loops]
    version = cuda_version()
    if loops != "dynamic":
        crash = "12.8 crashes with static and nested loops"
    else:
        crash = "dynamic loops were tried with 12.8"
    if version is None:
        return (
            None,
            f"JAX does not know its version of CUDA here; {crash}: use {_version(needed)} or later",
        )
    if version < needed:
        return False, (
            f"CUDA {_version(version)} is older than {_version(needed)}, and {crash}: install "
            f"{_version(needed)} or later"
        )
    return True, f"CUDA {_version(version)} runs {loops} loops"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def cuda_version() -> int | None:
    """Returns the version of the CUDA runtime by JAX's own query, such as 12090; None without a
    CUDA plugin.
    """
    from jax._src.lib import cuda_versions

    try:
        if cuda_versions is None:
            return None
        return int(cuda_versions.cuda_runtime_get_version())
    except (AttributeError, RuntimeError):  # JAX has renamed the query, or cannot load the library
        return None


def may_capture(command: str, xla_flags: str) -> bool:
    """Says whether these XLA_FLAGS put a command, WHILE or CONDITIONAL, into command buffers.

    Each flag of several changes what the ones before left: names with a plus or a minus sign are
    added or taken away, and others replace the set.
    """
    is_captured = False  # XLA's own set has neither
    for flag in xla_flags.split():
        if not flag.startswith(_COMMANDS):
            continue
        names = flag.removeprefix(_COMMANDS).split(",")
        if command in names or f"+{command}" in names:
            is_captured = True
        elif f"-{command}" in names or any(name[:1] not in ("+", "-") for name in names):
            is_captured = False
    return is_captured


def _is_accepted(flag: str) -> bool:
    environment = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return not subprocess.run(
        command, env=environment, capture_output=True, timeout=_SECONDS, check=False
    ).returncode
