"""The flags of libtpu with which a run is compiled: chosen, tried, and set before JAX loads libtpu.

libtpu reads its flags once, when JAX first asks for a device, from the variable LIBTPU_INIT_ARGS.
So nothing here imports JAX. A flag that is in the variable already stays as it is. The children of
`train.step.verify` and of `fa.check.compile_for` inherit the variable, and so verify and compile
what the run executes.
"""

import contextlib
import glob
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from flaxasync.check.progress import progress
from train.config import Config
from train.lifecycle.errors import InputError

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
PROBE_SECONDS = 300  # time limit of the child process that tries flags

_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # the vendor of these PCI devices, which are those of jax._src.hardware_utils
_PCI_CHIPS = {"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
# beginnings of TPU_ACCELERATOR_TYPE
_TYPES = {"v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}
# where flags are tried
_SLICES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}


def set_flags(config: Config) -> str:
    """Sets the flags of a run in this process, and returns a line about them, "" for a run that
    cannot be on TPUs.

    Flags that this libtpu refuses are left out if `auto` chose them; those that were given by hand
    end the run.
    """
    if not may_have_tpus(config):
        return ""
    chip = chip_of_machine()
    flags = wanted(config, chip)
    require_known(config, chip)
    if config.xla.flags == "auto" and flags and (refused := refusal(flags, chip)):
        return f"flags      none: {refused}"
    os.environ[VARIABLE] = with_flags(flags)
    return describe(config, chip, flags)


def require_known(config: Config, chip: str | None) -> None:
    """Checks that libtpu takes the flags that were given by hand."""
    if config.xla.flags in ("auto", "none"):
        return
    flags = wanted(config, chip)
    refused = ""
    if flags:
        refused = refusal(flags, chip)
    if refused:
        raise InputError(f"{refused}; correct --xla.flags, or use --xla.flags auto or none")


@contextlib.contextmanager
def flags_of(config: Config, chip: str) -> Iterator[str]:
    """Sets the flags that a run would have on a chip, for one block of code in which a child
    process compiles.

    Yields the line about them.
    """
    flags = wanted(config, chip)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = with_flags(flags)
    try:
        yield describe(config, chip, flags)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def wanted(config: Config, chip: str | None) -> dict[str, str]:
    """Returns the flags to add for a run, {"xla_...": value}, without those that LIBTPU_INIT_ARGS
    has already.
    """
    flags: Mapping[str, str] = {}
    if config.xla.flags not in ("auto", "none"):
        flags = parse(config.xla.flags)
    elif config.xla.flags == "auto" and config.mesh.model == 1:
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
    added = [f"--{name}={value}" for name, value in flags.items()]
    return " ".join([*added, there.strip()]).strip()


def describe(config: Config, chip: str | None, flags: Mapping[str, str]) -> str:
    """Says in one line which flags a run has, where they come from, and what else is possible."""
    others = [f"{name}={value}" for name, value in in_effect().items() if name not in flags]
    there = ""
    if others:
        there = f"; {VARIABLE} has {' '.join(others)}"
    named = " ".join(f"{name}={value}" for name, value in flags.items())
    if named:
        source = "as given"
        if config.xla.flags == "auto":
            source = f"auto, {chip}"
        return f"flags      {named} ({source}); --xla.flags none turns them off{there}"
    if config.xla.flags != "auto":
        return f"flags      none are added, by --xla.flags{there}"
    if chip is None:
        return (
            "flags      none: nothing here tells the kind of chip; --xla.flags name=value sets "
            f"some{there}"
        )
    if config.mesh.model != 1:
        return (
            f"flags      none (auto, {chip}): none is predicted to help where mesh.model is not "
            f"1{there}"
        )
    if chip in WHOLE_LAYERS:  # and the variable has them
        return f"flags      none are added (auto, {chip}){there}"
    return f"flags      none (auto, {chip}): none is predicted to help{there}"


def refusal(flags: Mapping[str, str], chip: str | None) -> str:
    """Tries flags, with those that are in effect, in a child process of libtpu; says what it
    refuses, or "".

    The child compiles a product with an all-gather for the chip, because libtpu refuses some flags
    only there.
    """
    # which is not on the path of a child where it is not installed
    checkout = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([checkout, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        VARIABLE: with_flags(flags),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-m", "train.step.flags_probe", _SLICES[chip or "v5e"]]
    try:
        with progress("asking libtpu whether it takes the flags"):
            child = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=PROBE_SECONDS,
            )
    except subprocess.TimeoutExpired:
        return f"libtpu did not say within {PROBE_SECONDS} s whether it takes {with_flags(flags)}"
    if child.returncode == 0:
        return ""
    lines = [line.strip() for line in child.stdout.splitlines() if re.search("ERROR|Error", line)]
    cause = (
        lines or child.stdout.strip().splitlines() or [f"it ended with code {child.returncode}"]
    )[-1]
    tried = in_effect() | dict(flags)
    blamed = [
        f"{name}={value}"
        for name, value in tried.items()
        if re.search(rf"\b{re.escape(name)}\b", cause)
    ]
    blamed.append(f"one of {with_flags(flags)}")
    return f"libtpu refuses {blamed[0]}: {cause}"


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
