"""A workdir in an object store: a working copy on this machine, and a mirror of it that is brought up to date.

An object store has no locks, no appending and no renaming of folders, on which a workdir depends. The run therefore
works in a folder of the user's cache, as it would in any other, and the mirror is brought up to date in the background
after every checkpoint, and at the end. The store has

```
URL/<file of the workdir>   every file, under the same name
URL/.incomplete/STEP        there while the checkpoint of that step is uploaded or deleted, and it is not to be read
URL/.owner.json             the start that may write here
```

A checkpoint without a mark is complete, or was copied to the store by other means; it is verified when it is restored,
as every checkpoint is. A start begins with the working copy of this machine if that is the newest one, and otherwise
with a copy of the store, which changes nothing there. It owns the store from the moment at which it begins to train. An
earlier start that still runs elsewhere asks before every change whether it is the owner, and ends without making it.
"""

import contextlib
import json
import math
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from train.data.remote import FIRST_PAUSE, LONGEST_PAUSE, describe, is_remote, list_objects, open_store, retry
from train.lifecycle.errors import InputError, RestartError, StorageError
from train.lifecycle.working_copy import CHECKPOINTS, WorkingCopy, is_half_written, stamp, step_of, steps_of

OWNER = ".owner.json"
INCOMPLETE = ".incomplete"
NOT_COPIED = ("set_aside/", "profile/")  # folders that a start on another machine does not need
LONGEST_OBJECT = 600.0  # seconds that one object may take at the end, before the store is taken to hang
_INCOMING = ".incoming"  # folder of the working copy into which the store is copied first
_REMADE = "corpus.json"  # a start writes it before it trains, and makes it again if it is lost
_UNKNOWN = [-1, 0]  # stands for size and time of a file that is in the store and of which nothing else is known


class Mirror:
    """The copy of a workdir in an object store.

    Attributes:
      start_name: A name that no other start has.
    """

    def __init__(
        self,
        location: str,
        folder: Path,
        *,
        seconds: float,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ):
        """Brings the working copy up to date.

        Args:
          location: The URL of the workdir.
          folder: The working copy, which this process has locked.
          seconds: Time for which a store that does not answer is asked again.
          say: Prints what is going on.
          warn: Prints what is wrong and does not end the run.

        Raises:
          InputError: The location or the permissions are wrong, or it is not clear which copy is the newest one.
          RestartError: The store was changed while it was copied.
          StorageError: The store did not answer in time.
        """
        self._location, self._seconds, self._say, self._warn = location, seconds, say, warn
        self._copy = WorkingCopy(folder)
        self._token = uuid.uuid4().hex
        self.start_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{self._token[:8]}"
        self._found: dict[str, list[Any]] = {}  # the objects of the store when this start looked
        self._is_owner = False
        self._lost: str | None = None
        # Uploads are made by a daemon thread, so that the end of the process does not wait for one that hangs.
        self._guard = threading.Lock()
        self._worker: threading.Thread | None = None
        self._is_dirty = self._is_stopped = self._is_closing = self._is_failing = False
        self._error: Exception | None = None  # of the last upload
        self._progress = 0.0  # time of the last change of the store
        retry(self._open, f"workdir={location}", seconds=seconds)

    @property
    def is_owner(self) -> bool:
        """Whether this start may write to the store, as far as it knows."""
        return self._is_owner and self._lost is None

    def take_over(self) -> None:
        """Makes this start the owner of the store. Checkpoints that are later than those here are not read any more.

        Raises:
          InputError: The store may not be written.
          RestartError: Another start changed the store since this one has copied it.
          StorageError: The store did not answer in time.
        """

        def act() -> None:
            if not self._is_owner:
                self._claim()
            newest = max(map(int, steps_of(self._copy.files())), default=0)
            for step in steps_of(self._copy.stored):
                if int(step) > newest:
                    self._mark(step)
            self._copy.write_state()

        retry(act, f"workdir={self._location}", seconds=self._seconds)

    def start_upload(self) -> None:
        """Brings the store up to date in the background, once more if that is going on already."""
        with self._guard:
            self._is_dirty = True
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._worker.start()

    def require_owner(self) -> None:
        """Checks that no later start has taken the store over, as far as the last upload knows.

        Raises:
          InputError: One has.
        """
        if self._lost is not None:
            raise InputError(self._lost)

    def close(self, *, seconds: float, at_most: float = math.inf) -> None:
        """Brings the store up to date if this start owns it.

        Args:
          seconds: Time for which a store that takes nothing is tried again.
          at_most: Time after which the upload is given up even if it proceeds.

        Raises:
          InputError: Another start has taken the store over.
          StorageError: The store could not be written.
        """
        if not self._is_owner:
            return
        self._is_closing, pause = True, FIRST_PAUSE
        self._progress = time.monotonic()
        end = self._progress + at_most
        while True:
            self.start_upload()
            self._wait(end)
            self.require_owner()
            if self._error is None:
                self._say(f"stored     {self._location}")
                return
            if time.monotonic() + pause > min(self._progress + seconds, end):
                raise self._not_stored(f"{describe(self._error)}, in attempts over {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def stop(self) -> None:
        """Ends an upload that is going on after its present object, and does not wait for it."""
        self._is_stopped = True

    def _open(self) -> None:
        self._store, self._root = open_store(self._location)
        self._copy.read_state()
        owner = self._read_owner()
        self._found = list_objects(self._store, self._root)
        content = [name for name in self._found if not name.startswith(".")]
        # A person who empties a working copy does not mean to empty the store.
        is_emptied = bool(steps_of(self._copy.stored) - self._copy.incomplete) and not steps_of(self._copy.files())
        if owner is None and (not content or (self._copy.owners and not is_emptied)):
            if self._copy.owners:
                self._keep_without_owner()
        elif owner is not None and owner["token"] in self._copy.owners and not is_emptied:
            self._copy.owners = [owner["token"]]
            self._claim()
        else:
            self._replace_working_copy(content, owner)

    def _keep_without_owner(self) -> None:
        """Keeps a working copy whose store lost the file that says who may write there, and uploads all of it."""
        local = self._copy.files()
        complete = steps_of(self._found) - self._marked()
        if lacking := complete - steps_of(local):
            raise InputError(
                f"workdir {self._location} has no {OWNER}, so it is not known whether it or its working copy "
                f"{self._copy.folder} is newer, and the working copy lacks the checkpoints of steps "
                f"{_listing(lacking)}. Remove the working copy to continue from the store, or those checkpoints from "
                "the store to continue from the working copy"
            )
        self._say(
            f"stored     {self._location} has no {OWNER}: the working copy {self._copy.folder} is kept, and all of "
            "it is uploaded again"
        )
        self._copy.stored, self._copy.incomplete = {}, set()
        self._claim()

    def _replace_working_copy(self, content: list[str], owner: dict[str, str] | None) -> None:
        """Replaces the working copy by the files of the store; nothing is lost that the store does not have."""
        unsaved = [
            name
            for name, now in self._copy.files().items()
            if name != _REMADE and (self._copy.stored.get(name) != now or step_of(name) in self._copy.incomplete)
        ]
        if unsaved:
            aside = self._copy.move_aside(self.start_name)
            writer = f"{_describe_owner(owner)} has written there since" if owner else f"it has no {OWNER}"
            self._warn(
                f"the working copy of {self._location} had {len(unsaved)} files that were not uploaded, such as "
                f"{unsaved[0]}, but {writer}; the working copy was moved to {aside}, and the "
                "run continues from the store"
            )
        self._copy.clear()
        self._copy.stored, self._copy.owners, self._copy.incomplete = {}, [], self._marked()
        if skipped := self._copy.incomplete & steps_of(content):
            self._warn(
                f"the checkpoints of steps {_listing(skipped)} in {self._location} are not read, because their upload "
                "was not finished"
            )
        wanted = [
            name
            for name in content
            if not name.startswith(NOT_COPIED)
            and step_of(name) not in self._copy.incomplete
            and not is_half_written(name)
        ]
        if wanted:
            self._say(f"copying    {len(wanted)} files from {self._location}")
        incoming = self._copy.folder / _INCOMING
        for name in wanted:
            path = incoming / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._store.get_file(f"{self._root}/{name}", str(path))
            except FileNotFoundError as error:
                raise self._changed() from error
            if path.stat().st_size != self._found[name][0]:
                raise self._changed()
        if wanted:
            for path in list(incoming.iterdir()):
                path.rename(self._copy.folder / path.name)
            incoming.rmdir()
        self._copy.stored = {name: stamp(self._copy.folder / name) for name in wanted}
        # Without an owner the next start does not trust this copy, unless this start takes the store over.
        self._copy.write_state()

    def _claim(self) -> None:
        """Becomes the owner of a store that has not changed since it was read."""
        if list_objects(self._store, self._root) != self._found:
            raise self._changed()
        # This machine notes that it will own the store before it does, so that a process that is killed in between
        # still knows its own working copy.
        self._copy.owners = [*self._copy.owners[-1:], self._token]
        self._copy.write_state()
        mine = {"token": self._token, "process": os.getpid(), "host": platform.node(), "unix": round(time.time())}
        self._store.pipe_file(f"{self._root}/{OWNER}", json.dumps(mine).encode())
        self._copy.owners, self._is_owner = [self._token], True
        # What the store has of checkpoints and the working copy has not is deleted by the next upload.
        for name in self._found:
            if name.startswith(f"{CHECKPOINTS}/"):
                self._copy.stored.setdefault(name, _UNKNOWN)
        self._copy.incomplete |= self._marked()

    def _changed(self) -> RestartError:
        return RestartError(
            f"another start wrote to {self._location} while this one was reading it, and this one changed nothing "
            "there; start again to continue from what is there now"
        )

    def _not_stored(self, cause: str) -> StorageError:
        return StorageError(
            f"{self._location} could not be written: {cause}. Nothing is lost: the working copy is "
            f"{self._copy.folder}, and a start on this machine continues from it"
        )

    def _read_owner(self) -> dict[str, str] | None:
        try:
            return dict(json.loads(self._store.cat_file(f"{self._root}/{OWNER}")))
        except FileNotFoundError:
            return None

    def _marked(self) -> set[str]:
        return {name.removeprefix(f"{INCOMPLETE}/") for name in self._found if name.startswith(f"{INCOMPLETE}/")}

    def _work(self) -> None:
        """Brings the store up to date until nobody has asked for it since."""
        while True:
            with self._guard:
                if not self._is_dirty or self._is_stopped:
                    self._worker = None
                    return
                self._is_dirty = False
            try:
                self._bring_up_to_date()
                self._error, self._is_failing = None, False
            except Exception as error:
                self._error = error
                if not self._is_failing and not self._is_closing and self._lost is None:
                    self._warn(
                        f"{self._location} could not be written: {describe(error)}; it is tried again after the next "
                        f"checkpoint, and the working copy {self._copy.folder} has everything"
                    )
                    self._is_failing = True

    def _wait(self, end: float) -> None:
        """Waits until the upload that is going on has ended."""
        while (worker := self._worker) is not None:
            worker.join(timeout=0.1)
            now = time.monotonic()
            if self._worker is not None and (now > end or now > self._progress + LONGEST_OBJECT):
                self.stop()
                raise self._not_stored("the upload was not finished in time")

    def _bring_up_to_date(self) -> None:
        """Uploads what has changed, then deletes what is gone here.

        Checkpoints come after the other files, because a checkpoint must not be newer than the lines of its steps.
        Those that are gone are deleted last, because until then the store may have no other.
        """
        try:
            local = self._copy.files()
            self._update(None, local)
            changed = {name for name, stamp in local.items() if self._copy.stored.get(name) != stamp}
            gone = self._copy.stored.keys() - local.keys()
            steps = steps_of(changed) | steps_of(gone) | self._copy.incomplete
            here = steps_of(local)
            for step in sorted(steps, key=lambda step: (step not in here, int(step))):
                self._mark(step)
                self._update(step, local)
                now = self._copy.files()
                if all(now.get(name) == local.get(name) for name in {*local, *now} if step_of(name) == step):
                    self._change(self._remove, f"{INCOMPLETE}/{step}")  # otherwise it is being deleted here
                    self._copy.incomplete.discard(step)
        finally:
            self._copy.write_state()

    def _update(self, step: str | None, local: dict[str, list[int]]) -> None:
        """Uploads and deletes the files of a checkpoint, or those that belong to none."""
        for name in sorted(
            name for name in local if step_of(name) == step and self._copy.stored.get(name) != local[name]
        ):
            try:
                self._change(self._store.put_file, str(self._copy.folder / name), f"{self._root}/{name}")
            except FileNotFoundError:
                if (self._copy.folder / name).exists():  # otherwise it was deleted here in the meantime
                    raise
                continue
            self._copy.stored[name] = local[name]
        for name in sorted(name for name in self._copy.stored if step_of(name) == step and name not in local):
            self._change(self._remove, name)
            del self._copy.stored[name]

    def _mark(self, step: str) -> None:
        """Says in the store that the checkpoint of a step is not to be read."""
        if step not in self._copy.incomplete:
            self._change(self._store.pipe_file, f"{self._root}/{INCOMPLETE}/{step}", b"incomplete")
            self._copy.incomplete.add(step)

    def _change(self, make: Callable[..., Any], *arguments: object) -> None:
        """Makes one change of the store, unless this start must not make it any more."""
        if self._is_stopped:
            raise TimeoutError("the upload was stopped")
        owner = self._read_owner()
        if owner is None:
            self._lost = (
                f"{self._location}/{OWNER} was removed while the run was going on, so this run ends; the working copy "
                f"{self._copy.folder} has everything, and a start on this machine uploads it again"
            )
        elif owner["token"] != self._token:
            self._lost = (
                f"workdir {self._location} was taken over by another start, {_describe_owner(owner)}; this one ends, "
                f"and wrote nothing there since. What was not uploaded is in the working copy {self._copy.folder}"
            )
        self.require_owner()
        make(*arguments)
        self._progress = time.monotonic()

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.rm_file(f"{self._root}/{name}")


@contextlib.contextmanager
def open_mirror(
    location: str, folder: Path, *, seconds: float, say: Callable[[str], None], warn: Callable[[str], None]
) -> Iterator[Mirror | None]:
    """Opens the mirror of a workdir that is in an object store; there is none for another workdir.

    Leaving the context brings the store up to date, in attempts over `seconds`; in `seconds` altogether if an error
    ends the run, which is printed first; and not at all after a second Ctrl-C.
    """
    if not is_remote(location):
        yield None
        return
    mirror = Mirror(location, folder, seconds=seconds, say=say, warn=warn)
    try:
        try:
            yield mirror
        except Exception as error:
            if mirror.is_owner:
                warn(f"the run ends ({describe(error)}) after an upload of at most {seconds:g} s to {location}")
                try:
                    mirror.close(seconds=seconds, at_most=seconds)
                except (InputError, StorageError) as second:  # the error that ends the run is the one to raise
                    warn(str(second))
            raise
        mirror.close(seconds=seconds)
    finally:
        mirror.stop()


def _describe_owner(owner: dict[str, str]) -> str:
    return f"process {owner['process']} on {owner['host']}"


def _listing(steps: Iterable[str]) -> str:
    return ", ".join(sorted(steps, key=int))
