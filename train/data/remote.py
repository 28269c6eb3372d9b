"""Locations in an object store, such as gs://bucket/run: which are understood, and how data are fetched from there.

Files are read and written through fsspec, whose clients gcsfs and s3fs are packages of their own. They take
credentials, and the address of another server, from the environment and from the configuration files of the clouds.
"""

import contextlib
import hashlib
import importlib.util
import json
import platform
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.lifecycle.errors import InputError, RunError, StorageError
from train.lifecycle.files import user_cache

if TYPE_CHECKING:
    import fsspec

CLIENTS = {"gs": "gcsfs", "s3": "s3fs"}
"""The package that each scheme needs."""
_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "LastModified",
    "updated",
    "created",
)  # what stores say about an object's content
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0  # seconds between attempts
DATA_SECONDS = 60.0  # time for which data are asked for again if the store does not answer
_STALE_SECONDS = 24 * 3600.0  # age at which an unfinished copy of data is taken for one that a killed process left
# What a client raises if the credentials, the bucket or the location are wrong, which more attempts do not change. Some
# clients have no class of their own for it, so the text and the HTTP status are asked, too.
_MISTAKES = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, ImportError)


def is_remote(location: str) -> bool:
    """Returns whether a location is a URL and not a path of this machine."""
    return "://" in location


def require_usable(location: str, field: str) -> None:
    """Checks that a location is a path of this machine, or in an object store whose client is installed.

    Args:
      location: The path that was given.
      field: The field of the configuration that names it, for the message.

    Raises:
      InputError: It is neither.
    """
    if not is_remote(location):
        return
    scheme, _, path = location.partition("://")
    client = CLIENTS.get(scheme)
    if client is None:
        raise InputError(
            f"{field} must be a path of this machine, or begin with {' or '.join(f'{s}://' for s in CLIENTS)}: "
            f"got {location}"
        )
    if not path.strip("/"):
        raise InputError(f"{field} must name a bucket: got {location}")
    if importlib.util.find_spec(client) is None:
        raise InputError(
            f"{field}={location} needs the package {client}, which is not installed: pip install {client}; or give a "
            "folder where the bucket is mounted, for example with gcsfuse or mount-s3"
        )


def require_local(location: str, field: str) -> None:
    """Checks that a location is a path of this machine.

    Raises:
      InputError: It is a URL such as gs://bucket/run.
    """
    if is_remote(location):
        raise InputError(
            f"{field} must be a path of this machine: got {location}. Copy it here, or give a folder where the bucket "
            "is mounted, for example with gcsfuse or mount-s3"
        )


def open_store(location: str) -> "tuple[fsspec.AbstractFileSystem, str]":
    """Returns the file system of a location and the path in it; listings are never taken from a cache."""
    import fsspec  # imported late, because most runs do not need it

    store, path = fsspec.core.url_to_fs(location, use_listings_cache=False, skip_instance_cache=True)
    return store, path.rstrip("/")


def list_objects(store: "fsspec.AbstractFileSystem", root: str) -> dict[str, list[Any]]:
    """Returns the objects below a path: {name below it: [size in bytes, and what tells versions apart]}.

    An object alone has the name "". Objects whose names end with a slash, with which some tools mark folders, are left
    out.
    """
    found: dict[str, dict[str, Any]] = store.find(root, detail=True)
    return {
        name.removeprefix(root).lstrip("/"): [info["size"], *(str(info.get(key)) for key in _VERSIONS)]
        for name, info in found.items()
        if not name.endswith("/") and info.get("type") != "directory"
    }


def retry[T](action: Callable[[], T], what: str, *, seconds: float) -> T:
    """Calls `action` until a store has answered it, and returns its result.

    Args:
      action: What is asked of the store.
      what: The location and the field that names it, for the message.
      seconds: Time for which an answer that may be different later is asked for again.

    Raises:
      InputError: The location or the permissions are wrong.
      StorageError: The store did not answer in time.
    """
    until, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        try:
            return action()
        except RunError:
            raise
        except Exception as error:  # the clients raise types of their own
            if is_mistake(error):
                raise InputError(f"{what} cannot be used: {describe(error)}") from error
            if time.monotonic() + pause > until:
                raise StorageError(
                    f"{what} did not answer: {describe(error)}, in attempts over {seconds:g} s; nothing was lost"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def is_mistake(error: Exception) -> bool:
    """Returns whether an error of a client says that the location, the bucket or the permissions are wrong."""
    return (
        isinstance(error, _MISTAKES)
        or "Credential" in type(error).__name__
        or getattr(error, "code", None) in (401, 403)
        or str(error).startswith("Forbidden")
    )


def fetch(location: str, field: str, *, retry_seconds: float = DATA_SECONDS) -> Path:
    """Copies a file or a folder of data into the user's cache folder, unless the same version is there already.

    Args:
      location: The URL.
      field: The field of the configuration that names it, for the message.
      retry_seconds: Time for which a store that does not answer is asked again.

    Returns:
      The local file or folder, whose name is that of the original.

    Raises:
      InputError: There is nothing at the location, or it may not be read.
      StorageError: The store did not answer in time.
    """
    return retry(lambda: _fetch(location, field), f"{field}={location}", seconds=retry_seconds)


def _fetch(location: str, field: str) -> Path:
    store, root = open_store(location)
    objects = list_objects(store, root)
    if not objects:
        raise InputError(f"{field} must be a file or a folder: there is no {location}")
    version = hashlib.blake2b(json.dumps([root, objects]).encode(), digest_size=16).hexdigest()
    folder = user_cache() / "data" / version
    name, sizes = root.rpartition("/")[2], {below: values[0] for below, values in objects.items()}
    if _sizes(folder / name) == sizes:
        return folder / name
    _remove_stale(folder.parent)
    temporary = _unique(folder)
    for below in sizes:
        copy = temporary / name / below
        copy.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{root}/{below}".rstrip("/"), str(copy))
    if _sizes(temporary / name) != sizes:
        raise OSError(f"{location} changed while it was copied")
    # A folder that is there already is damaged, or another process was faster. Its name is free after one rename, so
    # that a process which reads it keeps its files.
    with contextlib.suppress(FileNotFoundError):
        old = _unique(folder)
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        temporary.rename(folder)
    except OSError:
        if _sizes(folder / name) != sizes:  # otherwise another process made it in the meantime
            raise
    return folder / name


def _sizes(path: Path) -> dict[str, int]:
    """Returns the sizes of a file, or of the files in a folder, named as `list_objects` names them."""
    if path.is_file():
        return {"": path.stat().st_size}
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in path.rglob("*") if file.is_file()}


def _unique(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{platform.node()}.{uuid.uuid4().hex}.tmp")


def _remove_stale(folder: Path) -> None:
    """Removes the unfinished copies that killed processes left."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            newest = max(file.stat().st_mtime for file in (path, *path.rglob("*")))
            if time.time() - newest > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def describe(error: Exception) -> str:
    """Returns one line about an error of a client."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
