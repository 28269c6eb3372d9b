"""The persistent cache of compiled programs, which makes the second start of a run several times faster.

JAX keeps the programs in a folder. It locks the folder while it reads or writes, because the size is limited, and it
does not remove an entry that cannot be read; a process that is killed while it writes leaves such an entry.
"""

import contextlib
from pathlib import Path

import jax

from train.config import Config
from train.lifecycle.files import user_cache

MAX_BYTES = 8 << 30
MIN_COMPILE_SECONDS = 0.5  # programs that compile faster are not worth a file
_ENTRY, _TIME = "-cache", "-atime"


def configure_cache(config: Config) -> None:
    """Makes JAX keep compiled programs, unless `compile_cache` is none or JAX was told of a folder already."""
    if config.compile_cache == "none" or jax.config.jax_compilation_cache_dir:
        return
    folder = user_cache() / "programs" if config.compile_cache == "auto" else Path(config.compile_cache).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_incomplete(folder)
    except OSError:  # a home folder that cannot be written; the run only compiles more often
        return
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def remove_incomplete(folder: Path) -> None:
    """Removes entries that a killed process left half-written: JAX writes the time of use after the entry itself."""
    import filelock

    with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder / ".lockfile", timeout=10):
        for entry in folder.glob(f"*{_ENTRY}"):
            used = entry.with_name(entry.name.removesuffix(_ENTRY) + _TIME)
            if not used.exists() or not entry.stat().st_size:
                entry.unlink()
