"""The XLA flags with which a GPU runs while loops by itself, as conditional nodes of CUDA graphs.

XLA's default set of commands for command buffers contains neither WHILE nor CONDITIONAL, and XLA makes no graphs of
fewer than five commands. The host then reads the condition back before every iteration (`while_thunk.cc` and
`conditional_thunk.cc` in openxla/xla).
"""

import functools
import os
import subprocess
import sys

# The plus signs add to XLA's set, where bare names would replace it. The second flag is there because a loop alone is
# one command.
LOOPS, SMALL_GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL", "--xla_gpu_graph_min_graph_size=1"
_SECONDS = 120  # reading the flags takes one second; the rest allows for a busy machine


@functools.cache
def command_buffer_flags() -> str:
    """Returns what to add to XLA_FLAGS, before JAX is first used, so that while loops stay on a GPU.

    Each flag is first tried in a process of its own, because XLA aborts on a name that it does not know. Whether a loop
    was captured can only be measured, with `measure_dispatch` on the GPU.

    Raises:
      NotImplementedError: The installed jaxlib has no command buffers for while loops.
    """
    if not _is_accepted(LOOPS):
        import jaxlib

        raise NotImplementedError(
            f"jaxlib {jaxlib.__version__} does not take {LOOPS}: its while loops cannot be put into command buffers; "
            "give loops a trip count that is known when they are compiled, or install another jaxlib"
        )
    return f"{LOOPS} {SMALL_GRAPHS}" if _is_accepted(SMALL_GRAPHS) else LOOPS


def may_capture_loops(xla_flags: str) -> bool:
    """Says whether these XLA_FLAGS put while loops into command buffers."""
    return any("WHILE" in flag for flag in xla_flags.split() if flag.startswith("--xla_gpu_enable_command_buffer="))


def _is_accepted(flag: str) -> bool:
    environment = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return not subprocess.run(command, env=environment, capture_output=True, timeout=_SECONDS, check=False).returncode
