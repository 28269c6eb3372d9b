"""Which TPU kernels a call without a backend may take: those that passed `python -m
flaxasync.verify` on such a chip.

The verdicts are stored in the user's cache folder, in one file for each `Machine`, with measured
times, by which `flaxasync.plan` corrects what it predicts. docs/plan.md says what is trusted with
which verdicts, and what `FLAXASYNC_VERIFIED` changes. Several processes trust what the file of
process 0 says.

A ring of two devices does not show whether a kernel tells its directions apart, so its verdicts
count for rings of two only, and longer rings need a verdict of a longer ring. On one device only
attention, which sends nothing, has verdicts.

Where no TPU is attached, a mesh of TPUs is one of described devices: nothing runs there, and calls
take what is predicted to be fastest, unless the variable is set. `trusting` says for a block of
code which of the two holds.
"""

import concurrent.futures
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from flaxasync import hardware
from flaxasync.foreign_json import JsonError, MissingJsonError, read_json

FORMAT = 3  # of the file
PASSED = "PASS"
VARIABLE = "FLAXASYNC_VERIFIED"
PLAIN = frozenset(("none", "xla", "reference"))  # backends that are made of XLA's own operations
SOURCES = ("kernels/**/*.py", "ops/**/*.py", "transport/**/*.py", "ring.py")
COMMAND = "python -m flaxasync.verify"
# after which a file that is being written was left by a process that is gone
_UNFINISHED_SECONDS = 3600
# seconds to wait for the other processes, as long as `jax.distributed.initialize` waits for them
LIMIT = 300.0

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
    """Returns the settings that decide which kernels are trusted, for the keys of caches: the mode
    and the variable.
    """
    return _mode.get(), os.environ.get(VARIABLE)


def key(op: str, backend: str, ring: Axes, kind: str | None = None) -> str:
    """Returns the name of a verdict: op, backend, for what sends the class of the longest axis (1,
    2 or 3+), and kind.

    The kind is "int8" or "fp8" for products in 8 bits.
    """
    if op in ("attention", "expert_products"):
        return f"{op}/{backend}"
    if isinstance(ring, int):
        size = ring
    else:
        size = max(ring)
    return f"{op}/{backend}/{size if size < 3 else '3+'}" + (f"/{kind}" if kind else "")


def lacking(
    evidence: Evidence, op: str, backend: str, ring: Axes, kinds: Collection[str] = ()
) -> str | None:
    """Returns the first verdict, by name, that a kernel lacks for a call; None if a call may take
    it.

    `kinds` are the types of the call's products in 8 bits. "fused" multiplies them in its kernels
    and needs a verdict of each. Other backends send what they are given.
    """
    named = [
        key(op, backend, ring, kind)
        for kind in (None, *sorted(kinds if backend == "fused" else ()))
    ]
    return next((name for name in named if evidence.verdict(name) != PASSED), None)


def call_key(op: str, ring: Axes, shapes: Sequence[Sequence[int]], itemsize: int) -> str:
    """Returns the name under which times are stored: the op with its gradients at these shapes of
    one device.
    """
    devices = ring if isinstance(ring, int) else "x".join(map(str, ring))
    return (
        f"{op} on {devices}: {' '.join('x'.join(map(str, shape)) for shape in shapes)} of "
        f"{itemsize} bytes"
    )


def is_trusted(op: str, backend: str, chip: str, ring: Axes) -> bool:
    """Says whether a call of `op` without a backend may take this one; the rules are those of the
    file's head.
    """
    return is_assumed() or backend in PLAIN or lacking(known(chip), op, backend, ring) is None


def known(chip: str) -> Evidence:
    """Returns what is known about the kernels of a chip: in several processes, what process 0
    knows.

    Processes that trace different programs wait for each other for ever. So all of them must ask,
    after `jax.distributed.initialize`, and each waits for the others when it asks first. Nothing is
    sent about chips that are not attached, on which nothing runs, outside of
    `trusting("verified")`.

    Raises:
      RuntimeError: The other processes did not ask within `LIMIT` seconds.
    """
    if not has_several_processes():
        return _known_here(chip)
    if _mode.get() is None:
        matters = _is_attached(chip)
    else:
        matters = not is_assumed()
    if not matters:
        return _known_here(chip)
    with _agreeing:
        if chip not in _agreed:
            _agreed[chip] = _agree(chip)
        return _agreed[chip]


def has_several_processes() -> bool:
    """Says whether several processes share the devices, without opening the devices to find out."""
    from jax._src import distributed, xla_bridge

    if xla_bridge.backends_are_initialized():
        return jax.process_count() > 1
    return (distributed.global_state.num_processes or 1) > 1


def announce(
    op: str,
    wanted: str,
    taken: str,
    chip: str,
    ring: Axes,
    *,
    kinds: Collection[str] = (),
    faster: float | None = None,
) -> None:
    """Logs once that a call takes `taken`, because `wanted`, which is `faster` times as fast, is
    not trusted.
    """
    several = has_several_processes()
    command = f"`{COMMAND}`"
    everywhere = of_first = ""
    if several:
        command = f"`{COMMAND}`, on the host of process 0,"
        everywhere = " in every process"
        of_first = ", by the file of process 0"
    advice = f"{command} verifies it; naming it, or"
    evidence = known(chip)
    if evidence.rule == "stored":
        missing = lacking(evidence, op, wanted, ring, kinds) or key(op, wanted, ring)
        kind = missing.rpartition("/")[2]
        if kind in kinds:
            form = f" in {kind}"
        else:
            form = ""
        found = evidence.verdict(missing) or "not verified"
        why = f"was {found}{form} on {Machine.here(chip)}{of_first}"
    else:  # more verdicts would change nothing
        advice = "Naming it, or"
        why = "is not trusted because the processes differ"
        if os.environ.get(VARIABLE) == "none":
            why = f"{VARIABLE}=none excludes"
    if faster is not None:
        gain = f"; it is predicted to be {faster:.2f} times as fast"
    else:
        gain = ""
    say_once(
        f"{op} takes {taken!r} and not {wanted!r}, which {why}{gain}. {advice} "
        f"{VARIABLE}=all{everywhere}, takes it unverified"
    )


def read(machine: Machine) -> dict[str, dict]:
    """Returns the stored "verdicts", {`key`: {case: verdict}}, and "times", {`call_key`: {backend:
    seconds}}.

    Why a file is not used is said once.
    """
    file = machine.file
    try:
        content = read_json(file)
    except MissingJsonError:
        if _named_file():
            say_once(f"{VARIABLE} names {file}, which does not exist: no kernel is trusted")
        return _NOTHING
    except JsonError as error:
        why = str(error)
    else:
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            why = f"they are not in format {FORMAT} of this version"
        elif content.get("machine") != dataclasses.asdict(machine):
            why = f"they are of another machine or version, not of {machine}"
        elif not (
            _is_table(content.get("verdicts"), _is_text)
            and _is_table(content.get("times"), _is_time)
        ):
            why = "the file is damaged"
        else:
            return content
    say_once(f"the verdicts in {file} are not used, and no kernel is trusted: {why}")
    return _NOTHING


def record(
    machine: Machine,
    verdicts: Mapping[str, Mapping[str, str]],
    times: Mapping[str, Mapping[str, float]] = {},
) -> pathlib.Path | None:
    """Adds verdicts and times, as `read` returns them, replacing earlier ones of the same cases and
    calls.

    Returns the file; None where it cannot be written, or `VARIABLE` names a file of another
    machine, which is said.
    """
    file = machine.file
    try:
        if file.exists():
            stored = read(machine)
        else:
            stored = _NOTHING
        if _named_file() and file.exists() and stored is _NOTHING:
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
    """Writes a file at once, and removes what a process that was killed has left of an earlier
    attempt.
    """
    for left in file.parent.glob(f".{glob.escape(file.name)}.*.part"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - left.stat().st_mtime > _UNFINISHED_SECONDS:
                left.unlink()
    descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
    try:
        with open(descriptor, "w") as opened:
            opened.write(text)
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
        digest.update(
            file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0"
        )
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
    own = {"settings": settings, "evidence": dataclasses.asdict(_known_here(chip))}
    first, differences = _within_limit(functools.partial(_compare_with_first, own))
    for process, difference in enumerate(differences):
        if difference >= 0:
            say_once(
                "the processes differ, and none of them trusts a kernel: "
                f"{sorted(settings)[difference]} is not the same in process 0 and in process "
                f"{process}; it must be the same in all"
            )
            return Evidence("none")
    return Evidence(**first["evidence"])


def _compare_with_first(own: dict[str, dict]) -> tuple[dict[str, dict], list[int]]:
    """Returns what process 0 has here, and for each process the first setting, in the order of
    names, in which it differs from process 0, or -1.
    """
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    padded = np.resize(text, size)  # what other processes than 0 give is not read
    received = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    first = json.loads(received.tobytes())
    settings = own["settings"]
    difference = -1
    for number, name in enumerate(sorted(settings)):
        if difference < 0 and first["settings"].get(name) != settings[name]:
            difference = number
    return first, multihost_utils.process_allgather(np.int32(difference)).tolist()


def _within_limit[T](ask: Callable[[], T]) -> T:
    """Returns what the processes answer, or raises RuntimeError if some do not within `LIMIT`
    seconds.

    They are asked on another thread, because this one may trace a program on another mesh.
    """
    answer = concurrent.futures.Future[T]()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(LIMIT)
    except TimeoutError as error:
        raise RuntimeError(
            "the processes did not agree on the kernels to trust: not all of them asked within "
            f"{LIMIT:g} s; call flaxasync.ops.trust.known in all of them, after "
            "jax.distributed.initialize()"
        ) from error


def _is_attached(chip: str) -> bool:
    """Says whether the devices are TPUs of this name, or of this kind where the table of chips
    lacks them.
    """
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


def _is_table(part: object, is_entry: Callable[[object], bool]) -> bool:
    """Says whether a part of a file of verdicts is {name: {name: entry}}."""
    if not isinstance(part, dict) or not all(isinstance(row, dict) for row in part.values()):
        return False
    return all(is_entry(entry) for row in part.values() for entry in row.values())


def _is_text(entry: object) -> bool:
    return isinstance(entry, str)


def _is_time(entry: object) -> bool:
    """Says whether an entry is a time in seconds."""
    if isinstance(entry, bool) or not isinstance(entry, int | float):
        return False
    return 0 < entry < math.inf
