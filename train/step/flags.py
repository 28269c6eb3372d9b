"""The flags of libtpu with which a run is compiled: chosen by its chip, and set before JAX loads
libtpu.

libtpu reads its flags once, when JAX first asks for a device, from the variable LIBTPU_INIT_ARGS.
So nothing here imports JAX. A flag that is in the variable already stays as it is. The children of
`train.step.verify` and of `fa.check.compile_for` inherit the variable, and so verify and compile
what the run executes. libtpu ends a process that has a flag which it does not know, so flags are
added only for versions with which they were tested.
"""

import contextlib
import glob
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from flaxasync.check.tested_libtpu import TESTED_LIBTPU, installed_libtpu
from train.config import Config

VARIABLE = "LIBTPU_INIT_ARGS"
SCOPED = "xla_tpu_scoped_vmem_limit_kib"
WHOLE_LAYERS: Mapping[str, Mapping[str, str]] = {
    "v5e": {SCOPED: "98304"},
    "v6e": {SCOPED: "98304"},
    "v5p": {SCOPED: "49152"},  # a core has 64 MiB of vector memory, the others 128
}
"""Flags by chip that `auto` takes where mesh.model is 1, by the predictions of docs/train.md;
elsewhere none.
"""

_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # the vendor of these PCI devices, which are those of jax._src.hardware_utils
_PCI_CHIPS = {"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
# beginnings of TPU_ACCELERATOR_TYPE
_TYPES = {"v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}


def set_flags(config: Config) -> str:
    """Sets the flags of a run in this process, and returns a line about them, "" for a run that
    cannot be on TPUs.
    """
    if not may_have_tpus(config):
        return ""
    chip = chip_of_machine()
    flags = wanted(config, chip)
    os.environ[VARIABLE] = with_flags(flags)
    return describe(config, chip, flags)


@contextlib.contextmanager
def flags_of(config: Config, chip: str) -> Iterator[str]:
    """Sets the flags that a run would have on a chip, for one block of code in which a child
    process compiles.

    Yields the line about them.
    """
    flags = wanted(config, chip)
    with added(flags):
        yield describe(config, chip, flags)


@contextlib.contextmanager
def added(flags: Mapping[str, str]) -> Iterator[None]:
    """Adds flags, {"xla_...": value}, for one block of code."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = with_flags(flags)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def wanted(config: Config, chip: str | None) -> dict[str, str]:
    """Returns the flags to add for a run, without those that LIBTPU_INIT_ARGS has already."""
    if config.xla.flags == "none" or config.mesh.model != 1 or not _is_tested():
        return {}
    flags = WHOLE_LAYERS.get(chip or "", {})
    return {name: value for name, value in flags.items() if name not in in_effect()}


def parse(text: str) -> dict[str, str]:
    """Returns the flags of a text such as "xla_a=1 --xla_b=true", {"xla_a": "1", "xla_b": "true"}.

    A flag without a value is "true", as libtpu reads it.
    """
    pairs = (word.removeprefix("--").partition("=") for word in text.split())
    return {name: value if equals else "true" for name, equals, value in pairs}


def in_effect(platform: str = "tpu") -> dict[str, str]:
    """Returns the flags with which this process compiles for a platform, those that were there
    before included.
    """
    if platform != "tpu":
        return {}
    return parse(os.environ.get(VARIABLE, ""))


def with_flags(flags: Mapping[str, str]) -> str:
    """Returns the value of LIBTPU_INIT_ARGS with some flags before those that it has.

    JAX adds one at the end when it is imported on a machine with TPUs. The text must not depend on
    whether it was, because verdicts on kernels count only for the same text
    (`flaxasync.ops.trust.Machine`).
    """
    there = os.environ.get(VARIABLE, "")
    if not flags:
        return there
    texts = [f"--{name}={value}" for name, value in flags.items()]
    return " ".join([*texts, there.strip()]).strip()


def describe(config: Config, chip: str | None, flags: Mapping[str, str]) -> str:
    """Says in one line which flags a run has, where they come from, and what else is possible."""
    others = [f"{name}={value}" for name, value in in_effect().items() if name not in flags]
    there = ""
    if others:
        there = f"; {VARIABLE} has {' '.join(others)}"
    if flags:
        named = " ".join(f"{name}={value}" for name, value in flags.items())
        return f"flags      {named} (auto, {chip}); --xla.flags none turns them off{there}"
    if config.xla.flags == "none":
        return f"flags      none are added, by --xla.flags{there}"
    if chip is None:
        why = f": nothing here tells the kind of chip; {VARIABLE} sets some"
    elif config.mesh.model != 1:
        why = f" (auto, {chip}): none is predicted to help where mesh.model is not 1"
    elif not _is_tested():
        why = f" (auto, {chip}): they were not tested with this libtpu; {VARIABLE} sets some"
    elif chip in WHOLE_LAYERS:
        return f"flags      none are added (auto, {chip}){there}"  # as the variable has them
    else:
        why = f" (auto, {chip}): none is predicted to help"
    return f"flags      none{why}{there}"


def _is_tested() -> bool:
    return installed_libtpu() in TESTED_LIBTPU


def chip_of_machine() -> str | None:
    """Returns the kind of the attached TPU chips, such as "v6e", without opening them; None if
    nothing tells it.

    It asks the PCI devices and, where these are not visible, the variable TPU_ACCELERATOR_TYPE.
    """
    for vendor in sorted(_PCI.glob("*/vendor")):
        if vendor.read_text().strip() == _GOOGLE:
            found = _PCI_CHIPS.get((vendor.parent / "device").read_text().strip())
            if found is not None:
                return found
    return _TYPES.get(os.environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0])


def may_have_tpus(config: Config) -> bool:
    """Says whether the run may be on TPUs, without opening them: by its configuration, and by the
    files of chips.
    """
    if config.mesh.platform != "auto":
        return config.mesh.platform == "tpu"
    if (
        os.environ.get("JAX_PLATFORMS", "tpu").partition(",")[0] != "tpu"
        or importlib.util.find_spec("libtpu") is None
    ):
        return False
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
