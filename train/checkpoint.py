"""Checkpoints of a run: saved while training continues, restored onto any mesh, and verified when they are restored.

The checkpoint of step s is the folder `checkpoints/s/`. It appears there by one rename when all of its files are on
disk, so that a killed process never leaves half a checkpoint under that name. It holds the train state (arrays in their
global shapes) and a record: the data position, the architecture and the fingerprint of the state. Only the oldest
checkpoints beyond `checkpoint.keep` are ever deleted.
"""

import contextlib
import dataclasses
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from train.config import InputError
from train.fingerprint import fingerprint
from train.step import TrainState
from train.workdir import require_same

# Replicas share the writing of arrays of at least this many bytes. Each shape needs a compiled program that slices it,
# which costs more than it saves for small arrays.
MIN_BYTES_TO_SHARE = 2**20


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint stores beside its arrays, as JSON.

    Attributes:
      data: Position of the training batches.
      architecture: Architecture of the run that saved it, {"model.layers": 4, ...}.
      fingerprint: Fingerprint of the train state, see `train.fingerprint`.
    """

    data: dict[str, Any]
    architecture: dict[str, Any]
    fingerprint: dict[str, int]


class Checkpoints:
    """The checkpoints in a folder. Use it as a context manager: leaving it waits until every save is on disk."""

    def __init__(self, folder: Path, *, keep: int):
        self.folder = folder.resolve()  # orbax needs an absolute path
        self._remove_half_written()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.preservation_policy.LatestN(keep)
        )
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_BYTES_TO_SHARE)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            "record": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()

    def steps(self) -> list[int]:
        """Returns the steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def choose(self, step: int | None) -> int:
        """Chooses the step to restore.

        Args:
          step: The requested step, or None for the newest one.

        Returns:
          The step, or 0 if `step` is None and there is no checkpoint.

        Raises:
          InputError: There is no checkpoint of the requested step.
        """
        steps = self.steps()
        if step is None:
            return steps[-1] if steps else 0
        if step not in steps:
            raise InputError(
                f"checkpoint.step must be one that is in {self.folder}: got {step}, there are "
                f"{', '.join(map(str, steps)) or 'none'}"
            )
        return step

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of a step."""
        return self.folder / str(step)

    def save(self, step: int, state: TrainState, *, data: dict[str, Any], architecture: dict[str, Any]) -> None:
        """Copies the state to the host, then writes it to disk in the background.

        The call waits for the devices, and for the previous checkpoint if that is still being written.
        """
        record = Record(data, architecture, fingerprint(state))
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_as_dict(state)), record=ocp.args.JsonSave(dataclasses.asdict(record))
        )
        self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Waits until everything that was saved is on disk."""
        self._manager.wait_until_finished()

    def restore(
        self, step: int, abstract: TrainState, *, architecture: dict[str, Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads the checkpoint of a step onto the devices that `abstract` names, whatever mesh it was saved on.

        Args:
          step: The step of the checkpoint.
          abstract: Shape, type and sharding of every array of the state.
          architecture: The architecture that the checkpoint must have.

        Returns:
          The state and the data position.

        Raises:
          InputError: The checkpoint has another architecture, or it is damaged. The message of a damaged one names the
            checkpoint before it; nothing is deleted.
        """
        record = Record(**self._read(step, "record", ocp.args.JsonRestore()))
        require_same(record.architecture, architecture, where=str(self.path(step)), what="another architecture")
        targets = _as_dict(abstract)
        restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
        state = TrainState(**self._read(step, "state", ocp.args.PyTreeRestore(targets, restore_args=restore_args)))
        damaged = [name for name, bits in fingerprint(state).items() if record.fingerprint.get(name) != bits]
        if damaged:
            raise InputError(self._describe_damage(step, f"{damaged[0]} is not what was saved"))
        return state, record.data

    def set_aside(self, after: int, folder: Path) -> list[int]:
        """Moves the checkpoints of steps later than `after` into `folder`, where nothing deletes them.

        Returns:
          The steps whose checkpoints were moved.
        """
        later = [step for step in self.steps() if step > after]
        if later and jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for step in later:
                self.path(step).rename(_unused_path(folder / str(step)))
        if later and jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints set aside")
        self._manager.reload()
        return later

    def _remove_half_written(self) -> None:
        """Removes half-written checkpoints that a killed process left.

        orbax does the same, but in a background thread that may still be at work when the process of a complete run
        ends.
        """
        if jax.process_index() == 0:
            for half_written in self.folder.glob(f"*{ocp.path.step.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(half_written)

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> dict[str, Any]:
        arguments = ocp.args.Composite(**{item: args})
        with _silenced_abandoned_reads():
            try:
                restored = self._manager.restore(step, args=arguments)
            except Exception as error:  # orbax, tensorstore and json each raise types of their own
                raise InputError(self._describe_damage(step, f"{type(error).__name__}: {error}")) from error
        return dict(restored[item])

    def _describe_damage(self, step: int, cause: str) -> str:
        earlier = [other for other in self.steps() if other < step]
        cause = " ".join(cause.split())
        return (
            f"the checkpoint of step {step}, {self.path(step)}, is damaged "
            f"({cause if len(cause) <= 200 else cause[:200] + '...'}). Nothing was deleted. "
        ) + (
            f"The one before it is of step {earlier[-1]}: run again with --checkpoint.step {earlier[-1]} "
            "to continue from there; later checkpoints are then moved aside and kept."
            if earlier
            else "There is none before it: choose another --workdir to begin anew."
        )


@contextlib.contextmanager
def _silenced_abandoned_reads() -> Iterator[None]:
    """Silences the reads that orbax abandons when one of them fails.

    orbax reads all arrays concurrently. After the first failure each of the other reads prints a traceback to standard
    error because its event loop is closed, possibly much later. The settings are therefore restored after success
    only. The failure itself is raised to the caller with its message.
    """
    hook, level, filters = sys.unraisablehook, logging.getLogger("asyncio").level, warnings.filters[:]

    def ignore_closed_loop(event: "sys.UnraisableHookArgs") -> None:
        if "Event loop is closed" not in str(event.exc_value):
            hook(event)

    sys.unraisablehook = ignore_closed_loop
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    yield
    sys.unraisablehook = hook
    logging.getLogger("asyncio").setLevel(level)
    warnings.filters[:] = filters  # type: ignore[index]


def _as_dict(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _unused_path(path: Path) -> Path:
    """Returns the first of `path`, `path-1`, `path-2`, ... that does not exist."""
    candidate, count = path, 0
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate
