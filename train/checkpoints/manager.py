"""Checkpoints of a run: saved while training continues, restored onto any mesh, and verified when they are restored.

The checkpoint of step s is the folder `checkpoints/s/`. It appears there by one rename when all of its files are on
disk, so that a killed process never leaves half a checkpoint under that name. It holds the train state (arrays in their
global shapes) and a `train.checkpoints.record.Record`. Only the oldest checkpoints beyond `checkpoint.keep` are ever
deleted, and not those that `checkpoint.permanent_every` keeps.
"""

import dataclasses
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from train.checkpoints import orbax_noise
from train.checkpoints.fingerprint import fingerprint
from train.checkpoints.record import DamagedError, Record, RunIdentity, from_json
from train.lifecycle.errors import InputError, StorageError
from train.lifecycle.workdir import unused_path
from train.step.trainer import TrainState

# Replicas share the writing of arrays of at least this many bytes. Each shape needs a compiled program that slices it,
# which costs more than it saves for small arrays.
MIN_BYTES_TO_SHARE = 2**20
_FULL = re.compile("No space left|Disk quota exceeded|File too large", re.IGNORECASE)
# How errors of tensorstore begin, and what orbax says where files that it has just written are no longer there.
_STATUS = re.compile("[A-Z]+_[A-Z]+:|UNAVAILABLE:|INTERNAL:|ABORTED:|UNKNOWN:|Save failed:")


class WriteError(StorageError):
    """One attempt to write a checkpoint failed.

    Attributes:
      is_full: Whether the disk has no room, so that deleting older checkpoints helps.
    """

    def __init__(self, step: int, error: Exception):
        cause = _one_line(error)
        super().__init__(f"the checkpoint of step {step} could not be written: {cause}")
        self.step = step
        self.is_full = bool(_FULL.search(str(error)))


class Checkpoints:
    """The checkpoints in a folder. Use it as a context manager: leaving it waits until every save is on disk."""

    def __init__(self, folder: Path, *, keep: int, permanent_every: int = 0, read_only: bool = False):
        """Opens the folder."""
        orbax_noise.silence()
        self.folder = folder.resolve()  # orbax needs an absolute path
        self._permanent_every = permanent_every
        self._saving: int | None = None  # the step that is being written
        if not read_only:
            self._remove_half_written()
        policies = ocp.checkpoint_managers.preservation_policy
        preserve = [policies.LatestN(keep)]
        if permanent_every:
            preserve.append(policies.EveryNSteps(permanent_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(preserve), read_only=read_only, create=not read_only
        )
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_BYTES_TO_SHARE)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            "record": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    @classmethod
    def to_read(cls, folder: Path) -> Self:
        """Opens a folder from which checkpoints are only read, perhaps while another run saves there."""
        return cls(folder, keep=1, read_only=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._manager.close()
        except Exception:
            if kind is None:
                raise

    def steps(self) -> list[int]:
        """Returns the steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def choose(self, step: int | None) -> int:
        """Chooses the step to restore.

        Args:
          step: The requested step, 0 to begin anew, or None for the newest one.

        Returns:
          The step, or 0 if the run begins anew.

        Raises:
          InputError: There is no checkpoint of the requested step.
        """
        steps = self.steps()
        if step is None:
            return steps[-1] if steps else 0
        if step and step not in steps:
            raise InputError(
                f"--resume must be a step that is in {self.folder}: got {step}, there are "
                f"{', '.join(map(str, steps)) or 'none'}"
            )
        return step

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of a step."""
        return self.folder / str(step)

    def save(self, step: int, state: TrainState, *, data: dict[str, Any], tokens: int, identity: RunIdentity) -> None:
        """Copies the state to the host, then writes it to disk in the background.

        The call waits for the devices, and for the previous checkpoint if that is still being written.

        Raises:
          WriteError: The previous checkpoint, or the beginning of this one, could not be written.
        """
        self.wait()
        fields = _as_dict(state)
        record = identity.make_record(step, data, tokens, sorted(fields), fingerprint(state))
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(fields), record=ocp.args.JsonSave(record.to_json()))
        self._saving = step
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failure(error) from error

    def poll(self) -> int | None:
        """Checks without waiting whether the checkpoint that was being written is on disk.

        Returns:
          Its step when that is first known, otherwise None.

        Raises:
          WriteError: It could not be written.
        """
        if self._saving is None or self._manager.is_saving_in_progress():
            return None
        return self.wait()

    def wait(self) -> int | None:
        """Waits until what was saved is on disk, and returns its step as `poll` does.

        Raises:
          WriteError: It could not be written.
        """
        if self._saving is None:
            return None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        saved, self._saving = self._saving, None
        return saved

    def free_space(self) -> list[int]:
        """Deletes all checkpoints but the newest one and the permanent ones, and returns their steps."""
        spare = [step for step in self.steps()[:-1] if not self._permanent_every or step % self._permanent_every]
        for step in spare:
            self._manager.delete(step)
        return spare

    def restore(
        self, step: int, abstract: TrainState, identity: RunIdentity, *, accept_change: bool = False
    ) -> tuple[TrainState, Record, list[str]]:
        """Reads the checkpoint of a step onto the devices that `abstract` names, whatever mesh it was saved on.

        Args:
          step: The step of the checkpoint.
          abstract: Shape, type and sharding of every array of the state.
          identity: What the checkpoint must agree with.
          accept_change: Whether a checkpoint of other data is accepted.

        Returns:
          The state, the record, and the differences that were accepted. Parts of the state that the checkpoint lacks,
          such as a running mean that was not kept then, are None.

        Raises:
          InputError: The checkpoint is of another architecture or other data, or it is damaged. The message of a
            damaged one names the checkpoint before it; nothing is deleted.
        """
        record = self._read_record(step)
        changed = identity.require_same(record, where=str(self.path(step)), accept_change=accept_change)
        wanted = {name: value for name, value in _as_dict(abstract).items() if name in record.parts}
        return TrainState(**(_NOTHING | self._read_arrays(step, wanted, record))), record, changed

    def restore_params(self, step: int, abstract: Any, *, part: str = "params") -> Any:
        """Reads only the parameters of a checkpoint, or their running mean ("ema"), which may be of another run.

        Raises:
          InputError: The checkpoint is damaged, or its parameters have other names or shapes.
        """
        return self._read_arrays(step, {part: abstract}, self._read_record(step))[part]

    def require_same(self, step: int, identity: RunIdentity, *, accept_change: bool) -> list[str]:
        """Checks that a run can continue from the checkpoint of a step, see `RunIdentity.require_same`."""
        where = str(self.path(step))
        return identity.require_same(self._read_record(step), where=where, accept_change=accept_change)

    def record(self, step: int) -> Record:
        """Returns the record of a checkpoint."""
        return self._read_record(step)

    def set_aside(self, after: int, folder: Path) -> list[int]:
        """Moves the checkpoints of steps later than `after` into `folder`, where nothing deletes them.

        Returns:
          The steps whose checkpoints were moved.
        """
        later = [step for step in self.steps() if step > after]
        if later and jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for step in later:
                self.path(step).rename(unused_path(folder / str(step)))
        if later and jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints set aside")
        self._manager.reload()
        return later

    def _remove_half_written(self) -> None:
        """Removes half-written checkpoints that a killed process left.

        orbax does the same, but in a background thread that may still be at work when the process of a complete run
        ends. After a failed write, other threads of orbax may still create files in the folder while it is removed.
        What then stays is removed before the next attempt or at the next start, so it is no error here.
        """
        if jax.process_index() == 0 and self.folder.exists():
            for half_written in self.folder.glob(f"*{ocp.path.step.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(half_written, ignore_errors=True)

    def _failure(self, error: Exception) -> WriteError:
        """Makes a WriteError of what orbax raised, and removes what it left; anything but an I/O error is raised."""
        if not _is_io_error(error):
            raise error
        failed, self._saving = self._saving or 0, None
        self._remove_half_written()
        self._manager.reload()
        return WriteError(failed, error)

    def _read_record(self, step: int) -> Record:
        try:
            return from_json(self._read(step, "record", ocp.args.JsonRestore()))
        except DamagedError as error:
            raise InputError(self._describe_damage(step, str(error))) from error

    def _read_arrays(self, step: int, targets: dict[str, Any], record: Record) -> dict[str, Any]:
        restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
        args = ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=True)
        arrays = self._read(step, "state", args)
        damaged = [name for name, bits in fingerprint(arrays).items() if record.fingerprint.get(name) != bits]
        if damaged:
            raise InputError(self._describe_damage(step, f"{damaged[0]} is not what was saved"))
        return arrays

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> dict[str, Any]:
        arguments = ocp.args.Composite(**{item: args})
        try:
            restored = self._manager.restore(step, args=arguments)
        except Exception as error:  # orbax, tensorstore and json each raise types of their own
            raise InputError(self._describe_damage(step, f"{type(error).__name__}: {error}")) from error
        return dict(restored[item])

    def _describe_damage(self, step: int, cause: str) -> str:
        earlier = [other for other in self.steps() if other < step]
        return (
            f"the checkpoint of step {step}, {self.path(step)}, is damaged ({_one_line(cause)}). Nothing was deleted. "
        ) + (
            f"The one before it is of step {earlier[-1]}: run again with --resume {earlier[-1]} "
            "to continue from there; later checkpoints are then moved aside and kept."
            if earlier
            else "There is none before it: choose another --workdir to begin anew."
        )


_NOTHING = {field.name: None for field in dataclasses.fields(TrainState)}


def _as_dict(state: TrainState) -> dict[str, Any]:
    """Returns the parts of a state that are there, by name."""
    parts = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: part for name, part in parts.items() if part is not None}


def _one_line(error: object, length: int = 200) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= length else text[:length] + "..."


def _is_io_error(error: BaseException | None) -> bool:
    """Returns whether an error, or one that led to it, is of a file system or an object store."""
    while error is not None:
        if isinstance(error, OSError) or _STATUS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
