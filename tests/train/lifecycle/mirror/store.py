"""A store in memory, and what the tests of mirrors put into it and read from it."""

from pathlib import Path

import fsspec

from train.lifecycle.mirror import Mirror

STORE = fsspec.filesystem("memory")


def save(folder: Path, step: int, content: str = "") -> None:
    path = folder / "checkpoints" / str(step) / "state"
    path.mkdir(parents=True)
    (path / "array").write_text(f"array of {step}{content}")
    (path.parent / "record").write_text(f"record of {step}{content}")


def upload(mirror: Mirror) -> None:
    mirror.start_upload()
    wait(mirror)


def wait(mirror: Mirror) -> None:
    if (worker := mirror._worker) is not None:
        worker.join()


def path_in(location: str, name: str) -> str:
    return f"{location.removeprefix('memory:/')}/{name}"


def put(location: str, name: str, content: bytes = b"content") -> None:
    STORE.pipe_file(path_in(location, name), content)


def in_store(location: str) -> set[str]:
    return {name.removeprefix(path_in(location, "")) for name in STORE.find(path_in(location, "").rstrip("/"))} - {
        ".owner.json"
    }


def in_copy(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".mirror.json"}


def checkpoint(step: int) -> set[str]:
    return {f"checkpoints/{step}/state/array", f"checkpoints/{step}/record"}


def set_aside(folder: Path) -> list[Path]:
    return list(folder.parent.glob(f"{folder.name}-*"))
