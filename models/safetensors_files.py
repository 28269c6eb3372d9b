"""Safetensors files: parts of tensors read from one file or from indexed shards, and tensors written one by one.

Format: https://huggingface.co/docs/safetensors, a length of 8 bytes, a header in JSON, and the tensors end to end. The
`safetensors` package reads slices, but can only write what is in memory as a whole, so files are written here.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorFiles:
    """The tensors of a file, or of a folder with one file or with an index of several.

    Attributes:
      shapes: The shape of every tensor, by its name.
    """

    def __init__(self, path: Path):
        """Opens the files and reads their headers.

        Raises:
          ValueError: There are no such files, one is cut short or damaged, the index names a tensor that its file
            lacks, or a tensor has a type that is not floating-point; all of them are named.
        """
        self._of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        problems = []
        for file, names in _find(path).items():
            try:
                with safe_open(file, framework="np") as opened:
                    parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
                    found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
            except FileNotFoundError:
                problems.append(f"{file} is missing")
                continue
            except (SafetensorError, OSError) as error:
                problems.append(f"{file} is cut short or damaged ({error})")
                continue
            lacking = sorted(set(names or ()) - found.keys())
            problems += [f"{file} lacks {name}, which the index says is in it" for name in lacking]
            for name, (dtype, shape) in sorted(found.items()):
                if dtype not in _DTYPES:
                    problems.append(f"{name} is of type {dtype}; supported are {', '.join(_DTYPES)}")
                self._of[name], self.shapes[name] = file, shape
        if problems:
            raise ValueError(f"the tensors of {path} cannot be read: {'; '.join(problems)}")

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the part of a tensor that `index` selects; nothing else of it is read.

        The file is mapped for this call alone, because the pages that were read count as memory of the process.
        """
        with safe_open(self._of[name], framework="np") as file:
            return file.get_slice(name)[index]


def write(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], sizes: Mapping[str, int], *, shard_bytes: int
) -> None:
    """Writes tensors, one in memory at a time, as one file, or as several with an index.

    Args:
      folder: The folder, which must exist.
      tensors: The name and the value of every tensor, in the order of `sizes`.
      sizes: The bytes of every tensor, by its name.
      shard_bytes: The most bytes of a file that has more than one tensor.
    """
    shards = _divide(sizes, shard_bytes)
    files = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    for file, names in zip(files, shards, strict=True):
        _write_file(folder / file, tensors, {name: sizes[name] for name in names})
    if len(shards) > 1:
        index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _find(path: Path) -> dict[Path, list[str] | None]:
    """Returns the files, and the tensors that an index says are in each; None without an index."""
    if path.is_file():
        return {path: None}
    if (path / INDEX).is_file():
        try:
            index = json.loads((path / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / INDEX} is not an index of tensors ({type(error).__name__}: {error})") from error
        files: dict[Path, list[str] | None] = {path / name: [] for name in sorted(set(index.values()))}
        for tensor, name in index.items():
            files[path / name] = [*(files[path / name] or ()), tensor]
        return files
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    others = sorted(file.name for ending in ("*.bin", "*.pth", "*.pt", "*.gguf") for file in path.glob(ending))
    found = f"; {', '.join(others)} cannot be read, save them as safetensors first" if others else ""
    raise ValueError(f"there is neither {SINGLE} nor {INDEX} in {path}{found}")


def _divide(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_file(path: Path, tensors: Iterator[tuple[str, np.ndarray]], sizes: Mapping[str, int]) -> None:
    """Writes the next tensors. Their shapes are known last, so the header is written into room that is left for it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    room = 8 * (32 + sum(len(name) // 8 + 32 for name in sizes))  # a multiple of 8, as tensors must be aligned
    offset = 0
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.seek(8 + room)
        for name, size in sizes.items():
            given, value = next(tensors)
            assert (given, value.nbytes) == (name, size)
            header[name] = {
                "dtype": _NAMES[str(value.dtype)],
                "shape": list(value.shape),
                "data_offsets": [offset, offset + size],
            }
            # Not `tofile`, whose error on a full disk has no number. The view as bytes serves bfloat16 as well.
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            offset += size
        text = json.dumps(header).encode()
        assert len(text) <= room
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
