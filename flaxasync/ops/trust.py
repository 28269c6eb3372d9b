"""Which TPU kernels a call without a backend may take: those that passed `python -m
flaxasync.verify` on such a chip.

The verdicts are stored in the user's cache folder, in one file for each `Machine`, with measured
times, by which `flaxasync.plan` corrects what it predicts. docs/plan.md says what is trusted with
which verdicts, and what `FLAXASYNC_VERIFIED` changes. Several processes trust what the file of
process 0 says.

A ring of two devices does not show whether a kernel tells its directions apart, so its verdicts
count for rings of two only, and longer rings need a verdict of a longer ring. On one device only
attention and the products of experts, which send nothing, have verdicts.

Where no TPU is attached, a mesh of TPUs is one of described devices: nothing runs there, and calls
take what is predicted to be fastest, unless the variable is set. `trusting` says for a block of
code which of the two holds.
"""

import contextlib
import contextvars
import dataclasses
import functools
import glob
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from flaxasync import hardware
from flaxasync.foreign_json import JsonError, MissingJsonError, read_json
from flaxasync.ops import agreement

FORMAT = 3  # of the file
PASSED = "PASS"
VARIABLE = "FLAXASYNC_VERIFIED"
PLAIN = frozenset(("none", "xla", "reference"))  # backends that are made of XLA's own operations
SEND_NOTHING = ("attention", "expert_products")  # ops whose kernels are alike on every ring
SOURCES = ("kernels/**/*.py", "ops/**/*.py", "transport/**/*.py", "ring.py")
COMMAND = "python -m flaxasync.verify"

# after which what another process writes is no longer being written
_UNFINISHED_SECONDS = 3600

type Axes = int | tuple[int, ...]  # the devices of a ring, or of the axes of a mesh
Mode = Literal["predicted", "verified"]
_mode: contextvars.ContextVar[Mode | None] = contextvars.ContextVar("flaxasync_trust", default=None)
_agreed: "dict[str, Evidence]" = {}  # of chips, where several processes share them
_agreeing = threading.Lock()
_NOTHING: dict[str, dict] = {"verdicts": {}, "times": {}}
_log = logging.getLogger("flaxasync")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known about the kernels of a chip."""

    # which kernels are trusted: stored ones are those with the verdict "PASS"
    rule: Literal["all", "none", "stored"]
    # By the names of `key`: "PASS", or the verdict of a case that failed.
    verdicts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # By the names of `call_key`: the measured seconds of each backend.
    times: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def verdict(self, name: str) -> str | None:
        """Returns "PASS" if a kernel may be trusted, a verdict of the cases that failed, and None
        without any.
        """
        if self.rule == "stored":
            return self.verdicts.get(name)
        if self.rule == "all":
            return PASSED
        return None


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a verdict depends on: the chip, versions ("none" for what is not installed as a package)
    and options.
    """

    chip: str
    libtpu: str
    jax: str
    jaxlib: str
    flaxasync: str
    libtpu_options: str  # the variable LIBTPU_INIT_ARGS
    sources: str  # a digest of the sources on which kernels depend

    @staticmethod
    def here(chip: str) -> "Machine":
        """Returns the machine with this chip and the versions that are installed here."""
        versions = {name: version(name) for name in ("libtpu", "jax", "jaxlib", "flaxasync")}
        options = os.environ.get("LIBTPU_INIT_ARGS", "")
        return Machine(chip, **versions, libtpu_options=options, sources=digest_of_sources())

    @property
    def file(self) -> pathlib.Path:
        """Where the verdicts are stored; `VARIABLE` may name another file."""
        if named := _named_file():
            return named
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        digest = hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:16]
        return pathlib.Path(base) / "flaxasync" / f"verified-{digest}.json"

    def __str__(self) -> str:
        return (
            f"{self.chip} with libtpu {self.libtpu}, jax {self.jax} and flaxasync {self.flaxasync}"
        )


@contextlib.contextmanager
def trusting(mode: Mode) -> Iterator[None]:
    """Makes calls in a block take what is predicted to be fastest, or only what was verified."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def is_assumed() -> bool:
    """Says whether calls take every kernel that is predicted to be fastest, verified or not."""
    mode = _mode.get()
    if mode is not None:
        return mode == "predicted"
    return not os.environ.get(VARIABLE) and jax.default_backend() != "tpu"


def state() -> tuple[Mode | None, str | None]:
    """Returns what decides which kernels are trusted, the mode and the variable, for caches."""
    return _mode.get(), os.environ.get(VARIABLE)


def key(op: str, backend: str, ring: Axes, kind: str | None = None) -> str:
    """Returns the name of a verdict: op, backend, for what sends the class of the longest axis (1,
    2 or 3+), and kind.

    The kind is "int8" or "fp8" for products in 8 bits.
    """
    if op in SEND_NOTHING:
        return f"{op}/{backend}"
    if isinstance(ring, tuple):
        size = max(ring)
    else:
        size = ring
    return f"{op}/{backend}/{size if size < 3 else '3+'}" + (f"/{kind}" if kind else "")


def lacking(
    evidence: Evidence, op: str, backend: str, ring: Axes, kinds: Collection[str] = ()
) -> str | None:
    """Returns the first verdict, by name, that a kernel lacks for a call; None if it may be taken.

    `kinds` are the types of the call's products in 8 bits. "fused" multiplies them in its kernels
    and needs a verdict of each. Other backends send what they are given.
    """
    of_products: Collection[str] = ()
    if backend == "fused":
        of_products = sorted(kinds)
    for kind in (None, *of_products):
        name = key(op, backend, ring, kind)
        if evidence.verdict(name) != PASSED:
            return name
    return None


def call_key(op: str, ring: Axes, shapes: Sequence[Sequence[int]], itemsize: int) -> str:
    """Returns the name of the times of an op with its gradients, at these shapes of one device."""
    sizes = ring
    if not isinstance(sizes, tuple):
        sizes = (sizes,)
    devices = "x".join(str(int(size)) for size in sizes)
    operands = " ".join("x".join(str(int(length)) for length in shape) for shape in shapes)
    return f"{op} on {devices}: {operands} of {itemsize} bytes"


def is_trusted(op: str, backend: str, chip: str, ring: Axes) -> bool:
    """Says whether a call of `op` without a backend may take this one; the rules are those of the
    file's head.
    """
    return is_assumed() or backend in PLAIN or lacking(known(chip), op, backend, ring) is None


def known(chip: str) -> Evidence:
    """Returns what is known about the kernels of a chip: in several processes, what process 0
    knows.

    All processes must ask, after `jax.distributed.initialize`, and each waits for the others when
    it asks first. Nothing is sent about chips that are not attached, on which nothing runs, outside
    of `trusting("verified")`.

    Raises:
      RuntimeError: The other processes did not ask within `agreement.LIMIT` seconds.
    """
    if not agreement.has_several_processes():
        return _known_here(chip)
    mode = _mode.get()
    if mode is None:
        matters = _is_attached(chip)
    else:
        matters = mode == "verified"
    if not matters:
        return _known_here(chip)
    with _agreeing:
        if chip not in _agreed:
            _agreed[chip] = _agree(chip)
        return _agreed[chip]


def announce(
    op: str,
    wanted: str,
    taken: str,
    chip: str,
    ring: Axes,
    *,
    kinds: Collection[str] = (),
    faster: float | None = None,
    naming: str = "naming it",
) -> None:
    """Logs once that a call takes `taken`, because `wanted`, which is `faster` times as fast, is
    not trusted. `naming` says how a caller asks for it.
    """
    evidence = known(chip)
    missing = lacking(evidence, op, wanted, ring, kinds) or key(op, wanted, ring)
    advice = ""
    if evidence.rule == "stored":
        found = evidence.verdict(missing) or "not verified"
        why = f"was {found} on {Machine.here(chip)} ({missing})"
        advice = f"`{COMMAND}` verifies it; "
    elif os.environ.get(VARIABLE) == "none":
        why = f"{VARIABLE}=none excludes"
    else:
        why = "is not trusted because the processes differ"
    gain = ""
    if faster is not None:
        gain = f"; it is predicted to be {faster:.2f} times as fast"
    of_several = ""
    if agreement.has_several_processes():
        of_several = (
            ". The file of process 0 counts, and the variable must be the same in every process"
        )
    say_once(
        f"{op} takes {taken!r} and not {wanted!r}, which {why}{gain}. {advice}{VARIABLE}=all, or "
        f"{naming}, takes it unverified{of_several}"
    )


def read(machine: Machine) -> dict[str, dict]:
    """Returns the stored "verdicts", {`key`: {case: verdict}}, and "times", {`call_key`: {backend:
    seconds}}.

    Why a file is not used is said once.
    """
    file = machine.file
    try:
        content = read_json(file)
        _check(content, machine)
    except MissingJsonError:
        if _named_file():
            say_once(f"{VARIABLE} names {file}, which does not exist: no kernel is trusted")
        return _NOTHING
    except JsonError as error:
        say_once(f"the verdicts in {file} are not used, and no kernel is trusted: {error}")
        return _NOTHING
    return content


def record(
    machine: Machine,
    verdicts: Mapping[str, Mapping[str, str]],
    times: Mapping[str, Mapping[str, float]] = {},
) -> pathlib.Path | None:
    """Adds verdicts and times, as `read` returns them, in place of earlier ones of the same names.

    Returns the file; None where it cannot be written, or `VARIABLE` names a file of another
    machine, which is said.
    """
    file = machine.file
    try:
        stored = _NOTHING
        if file.exists():
            stored = read(machine)
        is_refused = file.exists() and stored is _NOTHING
        if _named_file() and is_refused:
            say_once(f"{VARIABLE} names {file}, which is not replaced, and no verdicts are stored")
            return None
        content: dict[str, Any] = {"format": FORMAT, "machine": dataclasses.asdict(machine)}
        for kind, new in (("verdicts", verdicts), ("times", times)):
            old = stored[kind]
            rows = {name: {**old.get(name, {}), **new.get(name, {})} for name in {*old, *new}}
            content[kind] = {name: row for name, row in rows.items() if row}
        file.parent.mkdir(parents=True, exist_ok=True)
        _replace(file, json.dumps(content, indent=1, sort_keys=True))
    except OSError as error:
        say_once(
            f"the verdicts cannot be stored, so these kernels stay untrusted: {error}; {VARIABLE} "
            "names a file"
        )
        return None
    return file


def _replace(file: pathlib.Path, text: str) -> None:
    """Writes a file at once, so that nobody reads half of it, and removes what a process that was
    killed has left of an earlier attempt.
    """
    for left in file.parent.glob(f".{glob.escape(file.name)}.*.part"):
        with contextlib.suppress(OSError):  # another process was faster, or another user's
            if time.time() - left.stat().st_mtime > _UNFINISHED_SECONDS:
                left.unlink()
    # hosts that share the folder can have processes of one number
    descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
    try:
        with open(descriptor, "w") as opened:
            opened.write(text)
        with contextlib.suppress(OSError):  # a file system without modes
            os.chmod(part, 0o644)  # other users may read a file that is named
        os.replace(part, file)
    except BaseException:
        os.unlink(part)
        raise


@functools.cache
def say_once(message: str) -> None:
    """Logs a message unless it was logged before."""
    _log.warning("flaxasync: %s", message)


@functools.cache
def digest_of_sources() -> str:
    """Returns a digest of the sources that decide what kernels and ops do: `SOURCES`."""
    package = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in package.glob(pattern)):
        name = file.relative_to(package).as_posix()
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def version(package: str) -> str:
    """Returns the version of a package, "none" where it is not installed as one."""
    if package == "flaxasync":
        # installed from a checkout, its metadata can be older
        return str(sys.modules["flaxasync"].__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _agree(chip: str) -> Evidence:
    """Returns what process 0 knows about the kernels of a chip, and nothing where processes differ
    in what a verdict depends on; all processes must call this.
    """
    settings = dataclasses.asdict(Machine.here(chip))
    settings[VARIABLE] = os.environ.get(VARIABLE, "")
    own = json.dumps(dataclasses.asdict(_known_here(chip)))
    of_first, difference = agreement.ask_first_process(settings, own)
    if difference is not None:
        say_once(
            f"the processes differ, and none of them trusts a kernel: {difference}; it must be the "
            "same in all"
        )
        return Evidence("none")
    return Evidence(**json.loads(of_first))


def _is_attached(chip: str) -> bool:
    """Says whether the devices are TPUs of this name, or of this kind if the table lacks them."""
    if jax.default_backend() != "tpu":
        return False
    kind = jax.devices()[0].device_kind
    found = hardware.chip_of_device(kind)
    return chip == (found.name if found else kind)


def _named_file() -> pathlib.Path | None:
    named = os.environ.get(VARIABLE, "")
    if named in ("", "all", "none"):
        return None
    return pathlib.Path(named).expanduser()


def _known_here(chip: str) -> Evidence:
    """Returns what this process knows about the kernels of a chip."""
    override = os.environ.get(VARIABLE, "")
    if override in ("all", "none"):
        return Evidence("all" if override == "all" else "none")
    machine = Machine.here(chip)
    if not override and machine.libtpu == "none":
        # the library of the chip has no version that would tell its verdicts from another's
        return Evidence("stored")
    stored = read(machine)
    verdicts: dict[str, str] = {}
    for name, cases in stored["verdicts"].items():
        if cases:  # a kernel of which no case ran was not verified
            verdicts[name] = next((text for text in cases.values() if text != PASSED), PASSED)
    return Evidence("stored", verdicts, stored["times"])


def _check(content: object, machine: Machine) -> None:
    """Raises JsonError, with the reason, for a file whose verdicts do not count on a machine."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise JsonError(f"they are not in format {FORMAT} of this version")
    if content.get("machine") != dataclasses.asdict(machine):
        raise JsonError(f"they are of another machine or version, not of {machine}")
    for kind in ("verdicts", "times"):
        table = content.get(kind)
        if not isinstance(table, dict) or not all(_is_row(kind, row) for row in table.values()):
            raise JsonError("the file is damaged")


def _is_row(kind: str, row: object) -> bool:
    """Says whether a row of "verdicts" has texts, and one of "times" seconds."""
    if not isinstance(row, dict):
        return False
    if kind == "verdicts":
        return all(isinstance(text, str) for text in row.values())
    return all(isinstance(seconds, float) and 0 < seconds < math.inf for seconds in row.values())
