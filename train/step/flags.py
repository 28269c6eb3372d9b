"""The flags of the compiler with which a run is compiled: chosen by its chip, and set before JAX
loads libtpu, or XLA for GPUs.

libtpu reads its flags once, when JAX first asks for a device, from the variable LIBTPU_INIT_ARGS.
So nothing here imports JAX. A flag that is in the variable already stays as it is. The children of
`train.step.verify` and of `fa.check.compile_for` inherit the variable, and so verify and compile
what the run executes. Both compilers end a process that has a flag which they do not know, so flags
are added only for versions with which they were tested. Those of XLA for GPUs are in the variable
XLA_FLAGS.
"""

import contextlib
import glob
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from flaxasync.check.tested_libtpu import TESTED_LIBTPU, installed_libtpu
from flaxasync.hardware import GPUS, SCHEDULER, gpu_of_device, is_gpu
from train.config import Config

VARIABLE = "LIBTPU_INIT_ARGS"
XLA_VARIABLE = "XLA_FLAGS"
SCOPED = "xla_tpu_scoped_vmem_limit_kib"
WHOLE_LAYERS: Mapping[str, Mapping[str, str]] = {
    "v5e": {SCOPED: "98304"},
    "v6e": {SCOPED: "98304"},
    "v5p": {SCOPED: "49152"},  # a core has 64 MiB of vector memory, the others 128
}
"""Flags by chip that `auto` takes where mesh.model is 1, by the predictions of docs/train.md;
elsewhere none.
"""

WITH_FSDP: Mapping[str, str] = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
}
"""Flags that `auto` takes on GPUs where mesh.fsdp is not 1, by the predictions of docs/gpu.md."""
# The share of a GPU's memory that JAX takes; its default, 0.75, is less than a dry run allows.
MEMORY_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MEMORY_SHARE = "0.95"
_TESTED_JAXLIB = "0.12."  # how the versions begin with which they were tested

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_GOOGLE = "0x1ae0"  # the vendor of these PCI devices, which are those of jax._src.hardware_utils
_PCI_CHIPS = {"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
# beginnings of TPU_ACCELERATOR_TYPE
_TYPES = {"v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}


def set_flags(config: Config) -> str:
    """Sets the flags of a run in this process, and the memory that JAX takes of a known GPU. Returns
    a line about the flags, "" for a run that cannot be on TPUs or GPUs.
    """
    if may_have_gpus(config):
        chip = gpu_of_machine()
        variable = XLA_VARIABLE
        if chip is not None and config.xla.flags != "none":
            os.environ.setdefault(MEMORY_VARIABLE, MEMORY_SHARE)
    elif may_have_tpus(config):
        chip = chip_of_machine()
        variable = VARIABLE
    else:
        return ""
    flags = wanted(config, chip)
    os.environ[variable] = with_flags(flags, variable)
    return describe(config, chip, flags, variable)


@contextlib.contextmanager
def flags_of(config: Config, chip: str) -> Iterator[str]:
    """Sets the flags that a run would have on a chip, for one block of code in which a child
    process compiles.

    Yields the line about them.
    """
    flags = wanted(config, chip)
    variable = VARIABLE
    if chip in GPUS:
        variable = XLA_VARIABLE
    with added(flags, variable):
        yield describe(config, chip, flags, variable)


@contextlib.contextmanager
def added(flags: Mapping[str, str], variable: str = VARIABLE) -> Iterator[None]:
    """Adds flags, {"xla_...": value}, for one block of code."""
    before = os.environ.get(variable)
    os.environ[variable] = with_flags(flags, variable)
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def wanted(config: Config, chip: str | None) -> dict[str, str]:
    """Returns the flags to add for a run, without those that its variable has already."""
    if chip in GPUS:
        return _wanted_on_gpus(config, chip)
    if config.xla.flags == "none" or config.mesh.model != 1 or not _is_tested():
        return {}
    flags = WHOLE_LAYERS.get(chip or "", {})
    return {name: value for name, value in flags.items() if name not in in_effect()}


def _wanted_on_gpus(config: Config, gpu: str) -> dict[str, str]:
    if config.xla.flags == "none" or not _is_tested_on_gpus() or _names_a_file():
        return {}
    there = in_effect("gpu")
    return {name: value for name, value in _of_gpus(config, gpu).items() if name not in there}


def _names_a_file() -> bool:
    """Says whether XLA_FLAGS is the name of a file of flags: no flag can be added to it."""
    there = os.environ.get(XLA_VARIABLE, "").strip()
    return there != "" and not there.startswith("-")


def _of_gpus(config: Config, gpu: str) -> dict[str, str]:
    """Returns the flags that a run on GPUs is predicted to gain by."""
    flags: dict[str, str] = {}
    if not GPUS[gpu].schedules:  # without it no transfer has work beside it
        flags[SCHEDULER] = "true"
    if config.mesh.fsdp != 1:
        flags |= WITH_FSDP
    return flags


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
    variables = {"tpu": VARIABLE, "gpu": XLA_VARIABLE}
    if platform not in variables:
        return {}
    return parse(os.environ.get(variables[platform], ""))


def platform_of(topology: str) -> str:
    """Returns the platform of a topology: "gpu" for "h100:8", "tpu" for "v5e:2x4"."""
    if is_gpu(topology):
        return "gpu"
    return "tpu"


def with_flags(flags: Mapping[str, str], variable: str = VARIABLE) -> str:
    """Returns the value of a variable with some flags before those that it has.

    JAX adds one to LIBTPU_INIT_ARGS at the end when it is imported on a machine with TPUs. The text
    must not depend on whether it was, because verdicts on kernels count only for the same text
    (`flaxasync.ops.trust.Machine`).
    """
    there = os.environ.get(variable, "")
    if not flags:
        return there
    texts = [f"--{name}={value}" for name, value in flags.items()]
    return " ".join([*texts, there.strip()]).strip()


def describe(
    config: Config, chip: str | None, flags: Mapping[str, str], variable: str = VARIABLE
) -> str:
    """Says in one line which flags a run has, where they come from, and what else is possible."""
    of_variable = parse(os.environ.get(variable, ""))
    others = [f"{name}={value}" for name, value in of_variable.items() if name not in flags]
    there = ""
    if others:
        there = f"; {variable} has {' '.join(others)}"
    if flags:
        named = " ".join(f"{name}={value}" for name, value in flags.items())
        return f"flags      {named} (auto, {chip}); --xla.flags none turns them off{there}"
    if config.xla.flags == "none":
        return f"flags      none are added, by --xla.flags{there}"
    if chip is None:
        why = f": nothing here tells the kind of chip; {variable} sets some"
    elif chip in GPUS:
        return _describe_none_on_gpus(config, chip, there)
    elif config.mesh.model != 1:
        why = f" (auto, {chip}): none is predicted to help where mesh.model is not 1"
    elif not _is_tested():
        why = f" (auto, {chip}): they were not tested with this libtpu; {VARIABLE} sets some"
    elif chip in WHOLE_LAYERS:
        return f"flags      none are added (auto, {chip}){there}"  # as the variable has them
    else:
        why = f" (auto, {chip}): none is predicted to help"
    return f"flags      none{why}{there}"


def _describe_none_on_gpus(config: Config, gpu: str, there: str) -> str:
    """Says why no flag is added on GPUs; `there` is the end of the line: what the variable has."""
    if not _is_tested_on_gpus():
        why = f"they were not tested with this jaxlib; {XLA_VARIABLE} sets some{there}"
    elif _names_a_file():
        why = f"{XLA_VARIABLE} names a file, to which none can be added"
    elif _of_gpus(config, gpu):  # as the variable has them
        return f"flags      none are added (auto, {gpu}){there}"
    else:
        why = f"none is predicted to help here{there}"
    return f"flags      none (auto, {gpu}): {why}"


def _is_tested() -> bool:
    return installed_libtpu() in TESTED_LIBTPU


def _is_tested_on_gpus() -> bool:
    return importlib.metadata.version("jaxlib").startswith(_TESTED_JAXLIB)


def gpu_of_machine() -> str | None:
    """Returns the name of the attached GPUs, such as "h100", without opening them; None if the
    table lacks them, or nothing tells it.
    """
    for information in sorted(_NVIDIA.glob("*/information")):
        for line in information.read_text().splitlines():
            name, _, kind = line.partition(":")
            found = gpu_of_device(kind.strip())
            if name == "Model" and found is not None:
                return found.name
    return None


def may_have_gpus(config: Config) -> bool:
    """Says whether the run may be on NVIDIA's GPUs, without opening them."""
    if config.mesh.platform != "auto":
        return config.mesh.platform == "gpu"
    named = os.environ.get("JAX_PLATFORMS", "cuda").partition(",")[0]
    return named in ("cuda", "gpu") and _NVIDIA.is_dir()


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
