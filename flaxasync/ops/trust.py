"""Which TPU kernels a call without a backend may take: those that passed `python -m flaxasync.verify` on such a chip.

A kernel that overlaps its transfers can hang a chip or be silently wrong, and this depends on the chip and on the
compiler. The verdicts are therefore stored in the user's cache folder, in one file for each `Machine`: the chip, the
versions of the software, the options of libtpu, and the sources of the kernels and ops. Beside them are the measured
times, by which `flaxasync.plan` corrects what it predicts for such a call. A call that names a backend never asks, and
backends that are plain XLA need no verdict.

A ring of two devices does not show whether a kernel tells its directions apart. Its verdicts count for rings of two
only, and longer rings need a verdict of a longer ring. On one device nothing is sent, so there only attention, which
sends nothing, has verdicts.

| FLAXASYNC_VERIFIED | what is trusted |
|---|---|
| not set | what passed on this chip with these versions, by the file in the cache folder |
| all | every kernel |
| none | no kernel |
| the path of a file | what passed by that file, if it is of this chip and these versions |

Where several processes share the chips, as on a pod, they trust what passed in all of them, on machines with the same
versions and options, and with the same variable. They exchange this at the first question about a chip, or when
`known` is called, and wait for each other. A difference is logged, and calls then take plain XLA in every process.

Where no TPU is attached, a mesh of TPUs is one of described devices: nothing runs there, and calls take what is
predicted to be fastest, unless the variable is set. `trusting` says for a block of code which of the two holds.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from flaxasync.ops import agreement
from flaxasync.ops.agreement import Evidence

FORMAT = 3  # of the file
VARIABLE = "FLAXASYNC_VERIFIED"
PASSED = "PASS"
PLAIN = frozenset(("none", "xla", "reference"))
"""Backends that are made of XLA's own operations."""
SOURCES = ("kernels/**/*.py", "ops/**/*.py", "transport/**/*.py", "ring.py")
COMMAND = "python -m flaxasync.verify"

type Times = Mapping[str, Mapping[str, float]]  # for each call, under a name of `call_key`, the seconds of each backend
Mode = Literal["predicted", "verified"]
_mode: contextvars.ContextVar[Mode | None] = contextvars.ContextVar("flaxasync_trust", default=None)
_agreed: dict[str, Evidence] = {}  # of chips, where several processes share them
_agreeing = threading.Lock()
_log = logging.getLogger("flaxasync")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a verdict depends on: the chip, the versions of the software, and its options.

    Attributes:
      chip: The name of the chip.
      libtpu, jax, jaxlib, flaxasync: Versions; that of libtpu is "none" where it is not installed as a package.
      libtpu_options: The environment variable LIBTPU_INIT_ARGS.
      sources: A digest of the sources of flaxasync on which kernels and ops depend, for checkouts that are edited.
    """

    chip: str
    libtpu: str
    jax: str
    jaxlib: str
    flaxasync: str
    libtpu_options: str
    sources: str

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
        rest = hashlib.sha256(repr((self.jaxlib, self.libtpu_options, self.sources)).encode()).hexdigest()[:8]
        text = f"verified-{self.chip}-libtpu-{self.libtpu}-jax-{self.jax}-flaxasync-{self.flaxasync}-{rest}.json"
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        return pathlib.Path(base) / "flaxasync" / re.sub(r"[^\w.+-]", "_", text)

    def __str__(self) -> str:
        return f"{self.chip} with libtpu {self.libtpu}, jax {self.jax} and flaxasync {self.flaxasync}"


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


def key(op: str, backend: str, ring: int | tuple[int, ...]) -> str:
    """Returns the name under which verdicts of a backend, or of a kernel of attention, are stored.

    It has the class of the ring, of its longest axis: "2" or "3+"; "1", which is never stored; attention has no ring.
    """
    if op == "attention":
        return f"{op}/{backend}"
    size = ring if isinstance(ring, int) else max(ring)
    return f"{op}/{backend}/{size if size < 3 else '3+'}"


def call_key(op: str, ring: int | tuple[int, ...], shapes: Sequence[Sequence[int]], itemsize: int) -> str:
    """Returns the name under which times are stored: the op with its gradients at these shapes of one device."""
    devices = ring if isinstance(ring, int) else "x".join(map(str, ring))
    return f"{op} on {devices}: {' '.join('x'.join(map(str, shape)) for shape in shapes)} of {itemsize} bytes"


def verdict(op: str, backend: str, chip: str, ring: int | tuple[int, ...]) -> str | None:
    """Returns "PASS" if a backend may be trusted, a verdict of the cases that failed, and None without any verdict."""
    return PASSED if backend in PLAIN else verdict_by(known(chip), op, backend, ring)


def verdict_by(evidence: Evidence, op: str, backend: str, ring: int | tuple[int, ...]) -> str | None:
    """Returns the verdict of a backend by what is known about the kernels of a chip."""
    if backend in PLAIN:
        return PASSED
    if evidence.rule != "stored":
        return PASSED if evidence.rule == "all" else None
    return evidence.verdicts.get(key(op, backend, ring))


def is_trusted(op: str, backend: str, chip: str, ring: int | tuple[int, ...]) -> bool:
    """Says whether a call of `op` without a backend may take this one; the rules are those of the file's head."""
    return is_assumed() or verdict(op, backend, chip, ring) == PASSED


def known(chip: str) -> Evidence:
    """Returns what is known about the kernels of a chip; several processes must all ask, and get the same answer.

    The first question of each process waits for those of the others. A program in which one process asks alone should
    call this in all of them, after `jax.distributed.initialize`. Nothing is exchanged about described devices, on which
    nothing runs, outside of `trusting("verified")`.
    """
    mode = _mode.get()
    if not agreement.has_several_processes() or mode == "predicted" or (not mode and jax.default_backend() != "tpu"):
        return _known_here(chip)
    with _agreeing:
        if chip not in _agreed:
            _agreed[chip], reason = agreement.agree(_known_here(chip), dataclasses.asdict(Machine.here(chip)))
            if reason:
                say_once(reason)
        return _agreed[chip]


def announce(
    op: str, wanted: str, taken: str, chip: str, ring: int | tuple[int, ...], *, faster: float | None = None
) -> None:
    """Logs once that a call takes `taken`, because `wanted`, which is `faster` times as fast, was not verified."""
    found = verdict(op, wanted, chip, ring)
    several = agreement.has_several_processes()
    why = f"was {found}" if found is not None else "was not verified" + (" in every process" if several else "")
    gain = f"; it is predicted to be {faster:.2f} times as fast" if faster is not None else ""
    command = f"`{COMMAND} --distributed`, started on every host," if several else f"`{COMMAND}`"
    advice = f"{command} verifies it; naming it, or {VARIABLE}=all, takes it unverified"
    say_once(f"{op} takes {taken!r} and not {wanted!r}, which {why} on {Machine.here(chip)}{gain}. {advice}")


def read(machine: Machine) -> dict[str, dict[str, str]]:
    """Returns the stored verdicts, {name: {case: verdict}} with the names of `key`."""
    return _read(machine)["verdicts"]


def record(
    machine: Machine, verdicts: Mapping[str, Mapping[str, str]], times: Times | None = None
) -> pathlib.Path | None:
    """Adds verdicts and times to those that are stored, replacing earlier ones of the same cases and calls.

    Verdicts are those of each case, under a text that identifies it, for each name of `key`.

    Returns:
      The file; None where it cannot be written, or `VARIABLE` names a file of another machine. Both are said.
    """
    file = machine.file
    try:
        stored = _read(machine) if file.exists() else _NOTHING
        if _named_file() and file.exists() and stored is _NOTHING:
            say_once(f"{VARIABLE} names {file}, which is not replaced, and no verdicts are stored")
            return None
        content: dict[str, Any] = {"format": FORMAT, "machine": dataclasses.asdict(machine)}
        for kind, new in (("verdicts", verdicts), ("times", times or {})):
            old = stored[kind]
            content[kind] = {name: {**old.get(name, {}), **new.get(name, {})} for name in {*old, *new}}
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            json.dump(content, part, indent=1, sort_keys=True)
        os.chmod(part.name, 0o644)  # other users may read a file that is named
        os.replace(part.name, file)
    except OSError as error:
        say_once(f"the verdicts cannot be stored, so these kernels stay untrusted: {error}; {VARIABLE} names a file")
        return None
    return file


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
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _named_file() -> pathlib.Path | None:
    named = os.environ.get(VARIABLE, "")
    return None if named in ("", "all", "none") else pathlib.Path(named).expanduser()


def _known_here(chip: str) -> Evidence:
    """Returns what this process knows about the kernels of a chip."""
    override = os.environ.get(VARIABLE, "")
    if override in ("all", "none"):
        return Evidence("all" if override == "all" else "none")
    machine = Machine.here(chip)
    if not override and machine.libtpu == "none":
        return Evidence("stored")  # the library of the chip has no version that would tell its verdicts from another's
    stored = _read(machine)
    failed = {name: [text for text in found.values() if text != PASSED] for name, found in stored["verdicts"].items()}
    return Evidence("stored", {name: texts[0] if texts else PASSED for name, texts in failed.items()}, stored["times"])


_NOTHING: dict[str, dict] = {"verdicts": {}, "times": {}}


def _read(machine: Machine) -> dict[str, dict]:
    """Returns the stored "verdicts" and "times"; says once why a file is not used."""
    file = machine.file
    try:
        content: Any = json.loads(file.read_text())
    except FileNotFoundError:
        if _named_file():
            say_once(f"{VARIABLE} names {file}, which does not exist: no kernel is trusted")
        return _NOTHING
    except (OSError, json.JSONDecodeError) as error:
        say_once(f"the verdicts in {file} cannot be read, and no kernel is trusted: {error}")
        return _NOTHING
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        why = f"they are not in format {FORMAT} of this version"
    elif content.get("machine") != dataclasses.asdict(machine):
        why = f"they are of another machine or version, not of {machine}"
    elif not all(_is_table(content.get(kind)) for kind in _NOTHING):
        why = "the file is damaged"
    else:
        return content
    say_once(f"the verdicts in {file} are not used, and no kernel is trusted: {why}")
    return _NOTHING


def _is_table(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(row, dict) for row in part.values())


@functools.cache
def version(package: str) -> str:
    """Returns the version of a package, "none" where it is not installed as one."""
    if package == "flaxasync":
        return str(sys.modules["flaxasync"].__version__)  # installed from a checkout, its metadata can be older
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
