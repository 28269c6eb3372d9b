"""Reads JSON that somebody else has written: one reader, and one error for all that can be wrong
with it.

A file may be no regular file (a pipe blocks for ever, a device has no end), too large, nested so
deeply that a parser runs out of stack, no UTF-8, or hold integers that Python refuses to convert.
All of these are a `JsonError`, whose message names the file. This module imports nothing of the
package, so that every layer may use it.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 32 << 20
"""The most bytes of a file; the index of a checkpoint of 200,000 tensors has about 24 MiB."""
MOST_DEPTH = 64
"""The most arrays and objects that are inside each other."""
MOST_DIGITS = 300
"""The most digits of an integer, so that every one of them can become a float."""

_MAYBE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """A text or a file is not JSON that can be used; the message names it, in one line."""


class MissingJsonError(JsonError):
    """There is no such file."""


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """Reads a file of JSON.

    Args:
      path: The file. It may be a link to a regular file.
      most_bytes: A larger file is refused before it is read.

    Returns:
      The value, whose texts are all valid Unicode.

    Raises:
      MissingJsonError: There is no such file.
      JsonError: It is no regular file, cannot be read, is too large, or is not JSON; see
        `parse_json`.
    """
    try:
        content = read_regular(path, most_bytes=most_bytes)
    except FileNotFoundError as error:
        raise MissingJsonError(f"there is no file {path}") from error
    except OSError as error:
        raise JsonError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_json(content, str(path))


def parse_json(content: bytes | str, name: str) -> Any:
    """Returns the value of a text in JSON.

    Args:
      content: The text, as bytes in UTF-8 or as a string.
      name: What an error calls it, such as its file and its line.

    Raises:
      JsonError: It is no UTF-8, no JSON, nested more deeply than `MOST_DEPTH`, or has an integer of
        more than `MOST_DIGITS` digits or a text that is no Unicode, which cannot be written again.
    """
    try:
        if isinstance(content, bytes):
            text = content.decode()
        else:
            text = content
        value = json.loads(text, parse_int=_integer)
        if _MAYBE_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise JsonError(
            f"{name} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from error
    except UnicodeEncodeError as error:
        raise JsonError(
            f"{name} has a text that is no Unicode: half of a surrogate pair"
        ) from error
    except RecursionError as error:
        raise _too_deep(name) from error
    except ValueError as error:
        raise JsonError(f"{name} is not JSON: {error}") from error
    if _is_deeper(value, MOST_DEPTH):
        raise _too_deep(name)
    return value


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """Reads a regular file.

    Raises:
      OSError: There is none, it cannot be read, it is no regular file, or it has more than
        `most_bytes`.
    """
    # A pipe without a writer would block the call that opens it, hence O_NONBLOCK, which changes no
    # regular file.
    with open(path, "rb", opener=_open_without_blocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        # the size that the system reports may be 0, as below /proc
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(
            f"it has more than {most_bytes:,} bytes, which is the most that is read of such a file"
        )
    return content


def _open_without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits, and the most is {MOST_DIGITS}")
    return int(digits)


def _is_deeper(value: object, most: int) -> bool:
    """Says whether more than `most` arrays and objects are inside each other, looking at one level
    at a time.
    """
    level = [value]
    for _ in range(most + 1):
        containers = [element for element in level if isinstance(element, (dict, list))]
        if not containers:
            return False
        level = []
        for container in containers:
            level.extend(container.values() if isinstance(container, dict) else container)
    return True


def _too_deep(name: str) -> JsonError:
    return JsonError(
        f"{name} is nested too deeply: the most is {MOST_DEPTH} arrays and objects inside each "
        "other"
    )
