"""Checkpoints of a run: saved while training goes on, restored onto any mesh, never silently wrong.

A checkpoint of step s is `checkpoints/s/`, and appears there by one rename when all of it is on disk. It holds the
train state (arrays, in their global shapes) and a record: the data position, the architecture and the fingerprint of
the state. Nothing here deletes a checkpoint other than the oldest ones beyond `checkpoint.keep`.
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

SHARED_BYTES = 2**20  # Of an array that replicas share the writing of: each shape takes a program that cuts it.


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint says beside its arrays; JSON.

    Attributes:
      data: position of the training batches.
      architecture: {"model.layers": 4, ...} of the run that saved it.
      fingerprint: of the train state, see `train.fingerprint`.
    """

    data: dict[str, Any]
    architecture: dict[str, Any]
    fingerprint: dict[str, int]


class Checkpoints:
    """The checkpoints in a folder. Use it as a context: leaving waits until what was begun is on disk."""

    def __init__(self, folder: Path, *, keep: int):
        self.folder = folder.resolve()  # orbax wants it absolute
        self._remove_half_written()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.preservation_policy.LatestN(keep)
        )
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SHARED_BYTES)
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
        """Returns `step`, which must be here, or the newest one where it is None; 0 where there is none.

        Raises:
          InputError: there is no checkpoint of that step.
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
        """Returns the folder of one checkpoint."""
        return self.folder / str(step)

    def save(self, step: int, state: TrainState, *, data: dict[str, Any], architecture: dict[str, Any]) -> None:
        """Copies the state to the host, then writes it in the background.

        Waits for the devices, and for the checkpoint before if that is still being written.
        """
        record = Record(data, architecture, fingerprint(state))
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_named(state)), record=ocp.args.JsonSave(dataclasses.asdict(record))
        )
        self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Returns when everything that was saved is on disk."""
        self._manager.wait_until_finished()

    def restore(
        self, step: int, abstract: TrainState, *, architecture: dict[str, Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads the checkpoint of `step` onto the devices that `abstract` names, whatever mesh it was saved on.

        Returns:
          (the state, the data position).

        Raises:
          InputError: it is of another architecture, or it is damaged. The message offers the one before it; nothing
            is deleted.
        """
        record = Record(**self._read(step, "record", ocp.args.JsonRestore()))
        require_same(record.architecture, architecture, where=str(self.path(step)), what="another architecture")
        named = _named(abstract)
        places = ocp.checkpoint_utils.construct_restore_args(named)
        state = TrainState(**self._read(step, "state", ocp.args.PyTreeRestore(named, restore_args=places)))
        wrong = [name for name, bits in fingerprint(state).items() if record.fingerprint.get(name) != bits]
        if wrong:
            raise InputError(self._damaged(step, f"{wrong[0]} is not what was saved"))
        return state, record.data

    def set_aside(self, after: int, folder: Path) -> list[int]:
        """Moves the checkpoints of later steps than `after` into `folder`, where nothing deletes them."""
        later = [step for step in self.steps() if step > after]
        if later and jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for step in later:
                self.path(step).rename(_free(folder / str(step)))
        if later and jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints set aside")
        self._manager.reload()
        return later

    def _remove_half_written(self) -> None:
        """Removes what a killed process left. orbax would, in a thread that a run that is complete does not await."""
        if jax.process_index() == 0:
            for left in self.folder.glob(f"*{ocp.path.step.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(left)

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> dict[str, Any]:
        arguments = ocp.args.Composite(**{item: args})
        with _abandoned_reads_are_quiet():
            try:
                restored = self._manager.restore(step, args=arguments)
            except Exception as error:  # orbax, tensorstore and json each have their own kinds
                raise InputError(self._damaged(step, f"{type(error).__name__}: {error}")) from error
        return dict(restored[item])

    def _damaged(self, step: int, cause: str) -> str:
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
def _abandoned_reads_are_quiet() -> Iterator[None]:
    """Keeps quiet the reads that orbax leaves behind when one of them fails.

    It reads all arrays at once. After the first failure the others find that nobody waits for them any more, and each
    says so on standard error, with a traceback, at some later time: so after a failure the quiet stays. The failure
    itself is raised, and loses nothing.
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


def _named(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _free(path: Path) -> Path:
    """Returns `path`, or `path-1`, `path-2`, ... where there is nothing yet."""
    candidate, count = path, 0
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate
