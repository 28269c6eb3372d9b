"""The module of what a caller passes: a compiled program, its text, or a file; and what the object
says beside it.
"""

import os
import pathlib
import sys
from typing import Any

from flaxasync.check.hlo.module import HloModule
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import HloError
from flaxasync.hardware import chip_of_device, gpu_of_device

_AS_TEXT = (
    "write it as text: XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text', or compiled.as_text()"
)
_DUMP = (
    "dump it with XLA_FLAGS=--xla_dump_to=DIR and audit the text of its last pass, "
    "*after_optimizations.txt"
)


def module_of(compiled: Any) -> HloModule:
    """Returns the module of a compiled program, of its text, or of a module. ValueError says why
    there is none.
    """
    if isinstance(compiled, HloModule):
        return compiled
    if isinstance(compiled, str):
        return parse(compiled)
    if not hasattr(compiled, "as_text"):
        raise ValueError(
            f"expected a compiled program or HLO text: got {type(compiled).__name__}; pass "
            "jitted.lower(...).compile(), or its text"
        )
    try:
        text = compiled.as_text()
    except NotImplementedError as error:
        raise ValueError(
            f"this platform gives no text of a compiled program ({error}); {_DUMP}"
        ) from error
    if not text:
        raise ValueError(f"the program has no text on this platform; {_DUMP}")
    return parse(text)


def chip_of(compiled: Any) -> str | None:
    """Returns the name of the chip that a program was compiled for; None if the object does not
    say.
    """
    if hasattr(compiled, "chip"):
        return compiled.chip
    for sharding in _shardings(compiled):
        for device in getattr(sharding, "device_set", ()):
            kind = device.device_kind
            found = chip_of_device(kind) or gpu_of_device(kind)
            return None if found is None else found.name
    return None


def axes_of(compiled: Any) -> dict[str, int]:
    """Returns the sizes of the mesh axes of a compiled program, by name; {} if the object does not
    say.
    """
    if hasattr(compiled, "axes"):
        return dict(compiled.axes)
    for sharding in _shardings(compiled):
        if getattr(sharding, "mesh", None) is not None:
            return dict(sharding.mesh.shape)
    return {}


def read_text(path: str | os.PathLike) -> str:
    """Returns the text of a file, or of standard input for "-". HloError says what the file is if
    it is no text.
    """
    try:
        if path == "-":
            text = sys.stdin.read()
        else:
            text = pathlib.Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        begin = error.object[:4]
        if begin == b"ML\xefR":
            what = "a lowered program (StableHLO bytecode), not the text of a compiled one"
        else:
            if begin[:2] == b"\x1f\x8b":
                what = "a gzip file"
            else:
                what = "no text, perhaps a protobuf"
        raise HloError(f"this is {what}: {_AS_TEXT}") from None
    if "\0" in text[:4096]:
        raise HloError(f"this is no text, perhaps a protobuf: {_AS_TEXT}")
    return text.removeprefix("\ufeff")  # the mark that some editors put before text


def read_module(path: str | os.PathLike) -> HloModule:
    """Reads a module from a file, or from standard input for "-". The errors are those of
    `read_text`.
    """
    return parse(read_text(path))


def _shardings(compiled: Any) -> list:
    """Returns the shardings of a compiled program's inputs and outputs; [] if it is not one of
    JAX's own.
    """
    jax = sys.modules.get("jax")  # reading a text must not import it
    if jax is None or not isinstance(compiled, jax.stages.Compiled):
        return []
    return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
