"""The XLA flags with which a GPU runs while loops by itself, as conditional nodes of CUDA graphs.

XLA's default set of commands for command buffers contains neither WHILE nor CONDITIONAL, and XLA makes no graphs of
fewer than five commands. The host then reads the condition back before every iteration (`while_thunk.cc` and
`conditional_thunk.cc` in openxla/xla).

CUDA 12.8 crashes with conditional nodes of while loops, so they need 12.9 or later. JAX before 0.8.3 has the same bug;
this package needs a later one.
"""

import functools
import logging
import os
import subprocess
import sys

# The plus signs add to XLA's set, where bare names would replace it. The second flag is there because a loop alone is
# one command.
_COMMANDS, SMALL_GRAPHS = "--xla_gpu_enable_command_buffer=", "--xla_gpu_graph_min_graph_size=1"
LOOPS = f"{_COMMANDS}+WHILE,+CONDITIONAL"
_NEEDED_CUDA = 12090  # as CUDA numbers 12.9
_SECONDS = 120  # reading the flags takes one second; the rest allows for a busy machine


@functools.cache
def command_buffer_flags() -> str:
    """Returns what to add to XLA_FLAGS, before JAX is first used, so that while loops stay on a GPU.

    Each flag is first tried in a process of its own, because XLA aborts on a name that it does not know. Whether a loop
    was captured can only be measured, with `measure_dispatch` on the GPU.

    Where JAX does not know the version of CUDA, a logged line says what it must be.

    Raises:
      NotImplementedError: CUDA is older than 12.9, or the installed jaxlib has no command buffers for while loops.
    """
    suits, note = cuda_note()
    if suits is False:
        raise NotImplementedError(f"while loops cannot be put into command buffers here: {note}")
    if suits is None:
        logging.getLogger(__name__).warning("flaxasync: %s", note)
    if not _is_accepted(LOOPS):
        import jaxlib

        raise NotImplementedError(
            f"jaxlib {jaxlib.__version__} does not take {LOOPS}: its while loops cannot be put into command buffers; "
            "give loops a trip count that is known when they are compiled, or install another jaxlib"
        )
    return f"{LOOPS} {SMALL_GRAPHS}" if _is_accepted(SMALL_GRAPHS) else LOOPS


def flags_for(*commands: str) -> str:
    """Returns the flags that put these commands, WHILE and CONDITIONAL, into command buffers. They are not tried."""
    return f"{_COMMANDS}{','.join(f'+{command}' for command in commands)} {SMALL_GRAPHS}"


def cuda_note() -> tuple[bool | None, str]:
    """Says whether the CUDA that JAX uses runs conditional nodes, and why; None if its version is not known."""
    version = cuda_version()
    if version is None:
        return (
            None,
            "JAX does not know its version of CUDA here; CUDA 12.8 crashes with conditional nodes: use 12.9 or later",
        )
    text = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if version < _NEEDED_CUDA:
        return False, f"{text} is older than 12.9, and 12.8 crashes with conditional nodes: install 12.9 or later"
    return True, f"{text} runs conditional nodes"


def cuda_version() -> int | None:
    """Returns the version of the CUDA runtime by JAX's own query, such as 12090; None without a CUDA plugin."""
    from jax._src.lib import cuda_versions

    try:
        return None if cuda_versions is None else int(cuda_versions.cuda_runtime_get_version())
    except (AttributeError, RuntimeError):  # JAX has renamed the query, or cannot load the library
        return None


def may_capture_loops(xla_flags: str) -> bool:
    """Says whether these XLA_FLAGS put while loops into command buffers."""
    return any("WHILE" in flag for flag in xla_flags.split() if flag.startswith("--xla_gpu_enable_command_buffer="))


def _is_accepted(flag: str) -> bool:
    environment = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return not subprocess.run(command, env=environment, capture_output=True, timeout=_SECONDS, check=False).returncode
