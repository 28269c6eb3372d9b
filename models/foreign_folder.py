"""Folders that somebody else has made: which of their files may be read, and how a message names
what is in them.

A name that a file gives, and a link, may lead anywhere. A file is read if it is a regular file
inside the folder. The one exception is the cache of Hugging Face, whose snapshots are folders of
links to the files in `blobs` beside them.
"""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

MOST_NAMED = 10
"""The most items of a list that a message names."""
MOST_LETTERS = 120
"""The most letters of a name or of a value that a message shows."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def checked_file(folder: Path, name: str, *, named_by: str = "") -> Path:
    """Returns the path of a file in a folder that somebody else has made.

    Args:
      folder: The folder.
      name: The name of the file, relative to the folder.
      named_by: What gives this name, such as an index, for messages.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: The name or a link leads out of the folder, or it is no regular file.
    """
    source = ""
    if named_by:
        source = f", which {named_by} names,"
    path = folder / name
    file = f"{folder}/{shown(name)}{source}"
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{shown(name)}{source} must be the name of a file inside {folder}")
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(kind):
        raise ValueError(f"{file} must be a regular file, and is none")
    if not _is_inside(folder, path):
        raise ValueError(
            f"{file} leads out of the folder, to {shown(os.path.realpath(path))}; copy that file "
            "into the folder if you trust it"
        )
    return path


def require_local_folder(path: Path, name: str) -> None:
    """Raises ValueError if a path is a URL, or cannot be printed; `name` is the option that gave
    it.
    """
    if _URL.match(str(path)):
        raise ValueError(
            f"{name} must be a folder of this machine, and not a URL: got {path}; mount or copy it "
            "first"
        )
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must have a path that is text in UTF-8: got {os.fsencode(path)!r}"
        ) from error


def listed(items: Iterable[object], separator: str = "; ") -> str:
    """Joins the first items of a list, and says how many others there are.

    >>> listed(range(12), ", ")
    '0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 2 more'
    """
    every = list(map(str, items))
    if len(every) > MOST_NAMED:
        every[MOST_NAMED:] = [f"and {len(every) - MOST_NAMED:,} more"]
    return separator.join(every)


def shown(value: object) -> str:
    """Returns a text or a value as a message shows it: in one line, and without what is too
    long.
    """
    text = str(value) if isinstance(value, (str, Path)) else repr(value)
    if not text.isprintable():
        text = repr(text)
    if len(text) > MOST_LETTERS:
        return f"{text[:MOST_LETTERS]}..."
    return text


def _is_inside(folder: Path, path: Path) -> bool:
    """Says whether a file, after all links, is in a folder, or in the blobs of a snapshot in
    Hugging Face's cache.
    """
    root = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(path))
    if target.is_relative_to(root):
        return True
    snapshots = root.parent
    return snapshots.name == "snapshots" and target.is_relative_to(snapshots.parent / "blobs")
