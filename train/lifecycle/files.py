"""The user's cache folder, and the replacement of a file that survives a process which is killed and a full disk."""

import os
import platform
from pathlib import Path


def user_cache() -> Path:
    """Returns the folder flaxasync/ in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flaxasync"


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file by one rename, so that a killed process leaves either the old or the new content.

    The name of the temporary file has the host and the process in it, because several processes may write one file.
    """
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
