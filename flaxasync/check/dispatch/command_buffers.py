"""The XLA flags that let a GPU run while loops by itself, as conditional nodes of CUDA graphs.

XLA's default set of command buffers has no WHILE and no CONDITIONAL, and leaves graphs of fewer than five commands
alone. Then the host reads the condition back before every iteration (`while_thunk.cc`, `conditional_thunk.cc` in
openxla/xla). Flags are read once, when the process first uses XLA: set them before that.
"""

import functools
import os
import subprocess
import sys

_CANDIDATES = (
    "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL",  # the plus signs add; bare names would replace the set
    "--xla_gpu_graph_min_graph_size=1",  # a loop alone is one command
)
_SECONDS = 120  # parsing flags takes one; the rest is for a busy machine


@functools.cache
def command_buffer_flags() -> str:
    """Returns what to add to XLA_FLAGS, before JAX is first used, so that while loops stay on a GPU.

    Each flag is first tried in a process of its own, for XLA aborts on a name that it does not know. That proves that
    the installed jaxlib takes the flags. Whether a certain loop was captured only `measure_dispatch` can tell, on the
    GPU.

    Returns:
      Flags that the installed jaxlib takes, separated by blanks; a flag of the second rank that it does not take is
      left out.

    Raises:
      NotImplementedError: the installed jaxlib has no command buffers for while loops.
    """
    accepted = [flag for flag in _CANDIDATES if _accepted(flag)]
    if _CANDIDATES[0] not in accepted:
        import jaxlib

        raise NotImplementedError(
            f"jaxlib {jaxlib.__version__} does not take {_CANDIDATES[0]}: its while loops cannot be put into command "
            "buffers; give loops a trip count that is known when they are compiled, or install another jaxlib"
        )
    return " ".join(accepted)


def may_capture_loops(xla_flags: str) -> bool:
    """Says whether these XLA_FLAGS put while loops into command buffers."""
    return any("WHILE" in flag for flag in xla_flags.split() if flag.startswith("--xla_gpu_enable_command_buffer="))


def _accepted(flag: str) -> bool:
    environment = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=_SECONDS, check=False)
    return done.returncode == 0
