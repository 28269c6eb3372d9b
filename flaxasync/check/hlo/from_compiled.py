"""Returns the module, the chip and the mesh axes of what a caller passes: a compiled program, or its text."""

from typing import Any

from flaxasync.check.hlo.module import HloModule
from flaxasync.check.hlo.reader import parse
from flaxasync.hardware import chip_of_device

_DUMP = "dump it with XLA_FLAGS=--xla_dump_to=DIR and audit the text of its last pass, *after_optimizations.txt"


def module_of(compiled: Any) -> HloModule:
    """Returns the parsed module of a compiled program, of its text, or of a module that is parsed already.

    Raises:
      HloError: The text cannot be read.
      ValueError: The argument is none of these, or a lowered program, or has no text on this platform.
    """
    if isinstance(compiled, HloModule):
        return compiled
    if isinstance(compiled, str):
        return parse(compiled)
    if not hasattr(compiled, "as_text"):
        raise ValueError(
            f"expected a compiled program or HLO text: got {type(compiled).__name__}; "
            "pass jitted.lower(...).compile(), or its text"
        )
    try:
        text = compiled.as_text()
    except NotImplementedError as error:
        raise ValueError(f"this platform gives no text of a compiled program ({error}); {_DUMP}") from error
    if not isinstance(text, str) or not text:
        raise ValueError(f"the program has no text on this platform; {_DUMP}")
    return parse(text)


def chip_of(compiled: Any) -> str | None:
    """Returns the name of the chip that a program was compiled for; None if the object does not say."""
    if isinstance(compiled, HloModule | str):
        return None  # a text does not name its chip, and reading one must not import JAX
    if hasattr(compiled, "chip"):
        return compiled.chip
    for sharding in _shardings(compiled):
        for device in getattr(sharding, "device_set", ()):
            found = chip_of_device(device.device_kind)
            return None if found is None else found.name
    return None


def axes_of(compiled: Any) -> dict[str, int]:
    """Returns the sizes of the mesh axes of a compiled program, by name; {} if the object does not say."""
    if isinstance(compiled, HloModule | str):
        return {}
    if hasattr(compiled, "axes"):
        return dict(compiled.axes)
    meshes = [mesh for s in _shardings(compiled) if (mesh := getattr(s, "mesh", None)) is not None]
    return dict(meshes[0].shape) if meshes else {}


def _shardings(compiled: Any) -> list:
    """Returns the shardings of a compiled program's inputs and outputs; [] if it is not one of JAX's own."""
    import jax

    if not isinstance(compiled, jax.stages.Compiled):
        return []
    return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
