"""The persistent cache of compiled programs, which makes the second start of a run several times faster."""

import contextlib
from pathlib import Path

import filelock
import jax

from train.config import Config
from train.lifecycle.files import user_cache

MAX_BYTES = 8 << 30
MIN_COMPILE_SECONDS = 0.5  # programs that compile faster are not worth a file


def configure_cache(config: Config) -> None:
    """Makes JAX keep compiled programs, unless `compile_cache` is none or JAX was told of a folder already."""
    if config.compile_cache == "none" or jax.config.jax_compilation_cache_dir:
        return
    folder = user_cache() / "programs" if config.compile_cache == "auto" else Path(config.compile_cache).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_incomplete(folder)
    except OSError:  # a home folder that cannot be written; the run only compiles more often
        return
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _remove_incomplete(folder: Path) -> None:
    """Removes entries that a killed process left half-written: JAX writes the time of use after the entry itself.

    JAX locks the folder in this way, too, and does not remove an entry that cannot be read.
    """
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder / ".lockfile", timeout=10):
        for entry in folder.glob("*-cache"):
            used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
            if not used.exists() or not entry.stat().st_size:
                entry.unlink()
