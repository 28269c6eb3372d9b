"""Calls from a compiled program into Python: jax.debug.print, jax.pure_callback, io_callback."""

import re

from flaxasync.check.hlo.module import Instruction

CALLBACK = re.compile(r"xla_(?:ffi_)?(?:partitioned_)?python_(?:cpu|gpu)_callback")
HOST_TRANSFERS = ("send", "recv")  # with is_host_transfer=true, these are how a TPU reaches a callback
# The public name of each primitive that calls Python.
_PUBLIC_NAMES = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
}


def is_host_callback(instruction: Instruction) -> bool:
    """Says whether an instruction calls Python. On TPU each operand and each result of the call is an instruction."""
    if instruction.opcode == "custom-call":
        return CALLBACK.fullmatch(instruction.custom_call_target) is not None
    return instruction.opcode in HOST_TRANSFERS and instruction.attributes.get("is_host_transfer") == "true"


def callback_name(instruction: Instruction) -> str:
    """Returns the public name of what calls Python: "jax.debug.print", "jax.pure_callback", ..."""
    primitive = instruction.op_name.rpartition("/")[2] or instruction.name.partition(".")[0]
    return _PUBLIC_NAMES.get(primitive, primitive)
