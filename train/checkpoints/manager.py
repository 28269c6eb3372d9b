"""Checkpoints of a run: saved while training continues, restored onto any mesh, and verified when
they are restored.

The checkpoint of step s is the folder `s/`. It holds the train state (arrays in their global
shapes) and a `train.checkpoints.record.Record`. orbax makes it complete by one rename, or in an
object store by one last object, so that a killed process never leaves half a checkpoint that is
read.
"""

import contextlib
import errno
import itertools
import logging
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from flaxasync.foreign_json import JsonError, parse_json, read_json
from models.foreign_folder import MOST_NAMED, listed
from train.checkpoints.record import (
    DamagedError,
    JsonFields,
    Record,
    RunIdentity,
    check_identity,
    check_parameters,
    fingerprint,
)
from train.config import Config
from train.config.command import is_step
from train.lifecycle.errors import InputError, StorageError, as_input_errors, one_line
from train.step.trainer import Trainer, TrainState

# Replicas share the writing of arrays of at least this many bytes. Each shape needs a compiled
# program that slices it, which costs more than it saves for small arrays.
MIN_BYTES_TO_SHARE = 2**20
# How errors of tensorstore begin, and what orbax says where files that it has just written are no
# longer there.
_STATUS = re.compile("[A-Z]+_[A-Z]+:|UNAVAILABLE:|INTERNAL:|ABORTED:|UNKNOWN:|Save failed:")


class Checkpoints:
    """The checkpoints in a folder, which may be in an object store; leaving the context waits until
    all are saved.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        *,
        keep: int = 1,
        permanent_every: int = 0,
        read_only: bool = False,
    ):
        """Opens the folder; `read_only` leaves it as it is, perhaps while another run saves
        there.
        """
        _silence_orbax()
        path = epath.Path(folder)
        # orbax needs absolute paths
        self.folder = path
        if _is_local(path):
            self.folder = path.expanduser().resolve()
        self._permanent_every = permanent_every
        self._read_only = read_only
        self._saving: int | None = None  # the step that is being written
        if not read_only:
            if _is_local(self.folder):
                _require_writable(Path(self.folder))
            self._remove_half_written()
        # with read_only, orbax neither creates nor cleans up
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=permanent_every or None,
            read_only=read_only,
            cleanup_tmp_directories=True,
        )
        arrays = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=MIN_BYTES_TO_SHARE
        )
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        state = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        handlers = {"state": state, "record": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._manager.close()
        elif (
            jax.process_count() == 1
        ):  # the other processes may be gone, and closing waits for them
            with contextlib.suppress(Exception):
                self._manager.close()

    def steps(self) -> list[int]:
        """Returns the steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def choose(self, step: int | None) -> int:
        """Returns the step to restore: the requested one, or for None the newest one, 0 if there is
        none.
        """
        steps = self.steps()
        if step is None:
            return max(steps, default=0)
        if step not in steps:
            if len(steps) > MOST_NAMED:
                steps.reverse()
            there = listed(steps, ", ") or "none"
            raise InputError(
                f"the step must be one that is in {self.folder}: got {step}, there are {there}"
            )
        return step

    def path(self, step: int) -> epath.Path:
        return self.folder / str(step)

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        data: JsonFields,
        tokens: int,
        identity: RunIdentity,
    ) -> None:
        """Copies the state to the host, for which it waits for the devices, then writes it in the
        background.

        This, `poll` and `wait` raise a StorageError if the previous checkpoint or this one could
        not be written.
        """
        self.wait()
        parts = _parts_of(state)
        sums = fingerprint(state)
        record = Record(
            **vars(identity),
            step=step,
            data=data,
            tokens=tokens,
            parts=sorted(parts),
            fingerprint=sums,
        )
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(parts), record=ocp.args.JsonSave(record.to_json())
        )
        self._saving = step
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failure(error) from error

    def poll(self) -> int | None:
        """Returns the step of the checkpoint that was being written if it is complete by now,
        otherwise None.
        """
        if self._manager.is_saving_in_progress():
            return None
        return self.wait()

    def wait(self) -> int | None:
        """Waits until what was saved is complete, and returns its step."""
        if self._saving is None:
            return None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        saved = self._saving
        self._saving = None
        return saved

    def free_space(self) -> list[int]:
        """Deletes all checkpoints but the newest one and the permanent ones, and returns their
        steps.
        """
        spare = [
            step
            for step in self.steps()[:-1]
            if not self._permanent_every or step % self._permanent_every
        ]
        for step in spare:
            self._manager.delete(step)
        return spare

    def restore(
        self, step: int, abstract: TrainState, identity: RunIdentity, *, accept_change: bool = False
    ) -> tuple[TrainState, Record, list[str]]:
        """Reads a checkpoint onto the devices that `abstract` names, whatever mesh it was saved on.

        Returns the state, where parts that the checkpoint lacks are None; the record; and the
        accepted differences.
        """
        record = self.record(step)
        changed = check_identity(
            record, identity, where=str(self.path(step)), accept_change=accept_change
        )
        wanted = {
            name: value for name, value in _parts_of(abstract).items() if name in record.parts
        }
        lacking: JsonFields = dict.fromkeys(vars(abstract))
        return TrainState(**lacking | self.read_arrays(step, wanted, record)), record, changed

    def read_arrays(
        self, step: int, targets: dict[str, PyTree], record: Record
    ) -> dict[str, PyTree]:
        """Reads some parts of a state, such as {"params": abstract arrays}, and compares them with
        their checksums.
        """
        restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
        args = ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=True)
        arrays = self._read(step, "state", args)
        for name, bits in fingerprint(arrays).items():
            if record.fingerprint.get(name) != bits:
                raise self._damaged(step, f"{name} is not what was saved")
        return arrays

    def record(self, step: int) -> Record:
        """Returns the record of a checkpoint.

        Raises an InputError if it is damaged, of another format, or of another step than its folder
        says.
        """
        try:
            if _is_local(self.folder):  # orbax would wait for ever for a pipe
                read_json(Path(self.path(step), "record", "metadata"))
            record = Record.from_json(self._read(step, "record", ocp.args.JsonRestore()))
        except (DamagedError, JsonError) as error:
            raise self._damaged(step, error) from error
        if record.step != step:
            where = self.path(step)
            raise InputError(
                f"the checkpoint of step {step}, {where}, holds step {record.step}: its folder was "
                "renamed, copied or linked. Nothing was deleted. Call it "
                f"{where.with_name(str(record.step))} again, or move it elsewhere"
            )
        return record

    def set_aside(self, after: int, folder: epath.Path) -> list[int]:
        """Moves the checkpoints of steps later than `after` into `folder`, and returns the
        steps.
        """
        later = [step for step in self.steps() if step > after]
        if later and jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if not folder.exists():  # an object store has a folder only while that has an object
                (folder / ".folder").touch()
            for step in later:
                self.path(step).rename(unused_path(folder / str(step)))
        if later:
            multihost_utils.sync_global_devices("checkpoints set aside")
        self._manager.reload()
        return later

    def _remove_half_written(self) -> None:
        """Removes what a killed process or a failed write has left; threads of orbax may still
        write there.
        """
        if jax.process_index() == 0 and self.folder.exists():
            for half_written in self.folder.glob(f"*{ocp.path.step.TMP_DIR_SUFFIX}*"):
                with contextlib.suppress(OSError):
                    half_written.rmtree()

    def _failure(self, error: Exception) -> StorageError:
        """Makes a StorageError of what orbax raised, and removes what it left; anything but an I/O
        error is raised.
        """
        if not _is_io_error(error):
            raise error
        failed = self._saving
        self._saving = None
        self._remove_half_written()
        self._manager.reload()
        return StorageError(
            f"the checkpoint of step {failed} could not be written: {one_line(error)}"
        )

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> dict[str, Any]:
        try:
            return dict(self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item])
        except Exception as error:  # orbax, tensorstore and json each raise types of their own
            raise self._damaged(step, f"{type(error).__name__}: {error}") from error

    def _damaged(self, step: int, cause: object) -> InputError:
        earlier = [other for other in self.steps() if other < step]
        advice = "There is none before it"
        if earlier and self._read_only:
            advice = f"The one before it is of step {earlier[-1]}, {self.path(earlier[-1])}"
        elif earlier:
            advice = (
                f"Run again with --resume {earlier[-1]} to continue from there; later ones are "
                "moved aside"
            )
        elif not self._read_only:
            advice += ": choose another --workdir to begin anew"
        what = f"the checkpoint of step {step}, {self.path(step)}, is damaged ({one_line(cause)})"
        return InputError(f"{what}. Nothing was deleted. {advice}.")


def load_parameters(
    location: epath.PathLike,
    config: Config,
    trainer: Trainer,
    *,
    step: int | None = None,
) -> tuple[PyTree, epath.Path]:
    """Reads the parameters of a checkpoint, whose architecture must be that of the configuration.

    `location` is the workdir of a run or of an import, a folder of checkpoints, or one of its
    checkpoints; without a `step` the newest one is read. Returns the parameters and the folder of
    the checkpoint.
    """
    folder, named = _find(epath.Path(location).expanduser())
    with Checkpoints(folder, read_only=True) as checkpoints:
        if step is not None:
            named = step
        chosen = checkpoints.choose(named)
        record = checkpoints.record(chosen)
        check_parameters(record, config, where=str(checkpoints.path(chosen)))
        stored = record.architecture["model.param_dtype"]
        if record.architecture["optimizer.master_copies"]:
            stored = "float32"
        dtype = jnp.dtype(stored)
        params = trainer.abstract_state().params
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), params
        )
        arrays = checkpoints.read_arrays(chosen, {"params": abstract}, record)
        return arrays["params"], checkpoints.path(chosen)


def unused_path(path: epath.Path) -> epath.Path:
    """Returns the first of `path`, `path-1`, `path-2`, ... that does not exist."""
    candidates = itertools.chain(
        [path], (path.with_name(f"{path.name}-{count}") for count in itertools.count(1))
    )
    return next(candidate for candidate in candidates if not candidate.exists())


def _find(path: epath.Path) -> tuple[epath.Path, int | None]:
    """Returns the folder of checkpoints and the step that a path names; None is the newest one."""
    if is_step(path.name) and (path / "state").is_dir():
        return path.parent, int(path.name)
    folders = [path / "checkpoints", path / "imported", path]
    if elsewhere := _named_folder(path / "config.json"):
        folders.insert(0, epath.Path(elsewhere).expanduser())
    for folder in folders:
        if folder.is_dir() and any(
            (child / "state").is_dir() for child in folder.iterdir() if is_step(child.name)
        ):
            return folder, None
    raise InputError(
        f"{path} must be the workdir of a run or of an import, or one of its checkpoints: there is "
        "no checkpoint in it"
    )


def _named_folder(file: epath.Path) -> str | None:
    """Returns the folder in which a run keeps its checkpoints, if its configuration names another
    than its own.
    """
    if not file.exists():
        return None
    with as_input_errors(JsonError):
        if _is_local(file):
            config = read_json(Path(file))
        else:
            config = parse_json(file.read_bytes(), str(file))
    try:
        folder = config["checkpoint"]["folder"]
    except (KeyError, TypeError, IndexError):
        return None
    if isinstance(folder, str):
        return folder
    return None


def _is_local(path: epath.Path) -> bool:
    return "://" not in str(path)


def _require_writable(folder: Path) -> None:
    """Checks that checkpoints can be written into a folder, which is made; a full disk may have
    room again later.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE):
            raise InputError(
                f"checkpoint.folder must be a folder that can be written: {folder}: "
                f"{error.strerror or error}"
            ) from error


def _parts_of(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in vars(state).items() if part is not None}


def _is_io_error(error: BaseException | None) -> bool:
    """Returns whether an error, or one that led to it, is of a file system or an object store."""
    while error is not None:
        if isinstance(error, OSError) or _STATUS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _silence_orbax() -> None:
    """Silences the tracebacks that threads of orbax print of failures, which are raised to the
    caller as well.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings(
        "ignore", message="coroutine .* was never awaited", category=RuntimeWarning
    )
    if sys.unraisablehook is not _ignore_closed_loops:
        global _hook
        _hook = sys.unraisablehook
        sys.unraisablehook = _ignore_closed_loops


def _ignore_closed_loops(event: "sys.UnraisableHookArgs") -> None:
    if "Event loop is closed" not in str(event.exc_value):
        _hook(event)


_hook = sys.__unraisablehook__
