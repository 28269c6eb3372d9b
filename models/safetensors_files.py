"""Safetensors files: parts of tensors read from one file or from indexed shards, and tensors
written one by one.

Format: https://huggingface.co/docs/safetensors, a length of 8 bytes, a header in JSON, and the
tensors end to end. The `safetensors` package reads slices, but can only write what is in memory as
a whole, so files are written here.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from flaxasync.foreign_json import read_json
from models.foreign_folder import checked_file, listed, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_COMPARED = 1 << 24  # the most values of a tensor that are compared at a time
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorFiles:
    """The tensors of a file, or of a folder with one file or with an index of several.

    Attributes:
      path: The file or the folder.
      shapes: The shape of every tensor, by its name.
      unused: The files of a folder that its model.safetensors stands above, as for `transformers`.
    """

    def __init__(self, path: Path):
        """Opens the files and reads their headers.

        Raises:
          ValueError: There are no such files, one is cut short, damaged or no regular file inside
            the folder, the index names a tensor that its file lacks, two files have a tensor of one
            name, or a tensor has a type that is not floating-point, or float64; they are named.
        """
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unused: list[str] = []
        self._file_of: dict[str, Path] = {}
        if os.path.lexists(path / SINGLE) and os.path.lexists(path / INDEX):  # see `_find`
            self.unused.append(INDEX)
        files = _find(path)
        indexed = {tensor: file for file, tensors in files.items() for tensor in tensors}
        problems = []
        for file, names in files.items():
            try:
                found = _read_header(file)
            except ValueError as error:
                problems.append(str(error))
                continue
            lacking = sorted(set(names) - found.keys())
            problems += [
                f"{file} lacks {shown(name)}, which the index says is in it" for name in lacking
            ]
            for name, (dtype, shape) in sorted(found.items()):
                if name in indexed and indexed[name] != file:
                    continue  # the index says that it is in another file
                if name in self._file_of:
                    both = f"{self._file_of[name].name} and {file.name}"
                    problems.append(
                        f"{shown(name)} is in {both}, and the index does not say which of them is "
                        "right"
                    )
                if dtype not in _DTYPES:
                    problems.append(
                        f"{shown(name)} is of type {dtype}; supported are {', '.join(_DTYPES)}"
                    )
                self._file_of[name] = file
                self.shapes[name] = shape
        if problems:
            raise ValueError(f"the tensors of {path} cannot be read: {listed(problems)}")

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the part of a tensor that `index` selects; nothing else of it is read.

        The file is mapped for this call alone, because the pages that were read count as memory of
        the process.
        """
        with safe_open(self._file_of[name], framework="np") as file:
            return file.get_slice(name)[index]

    def are_equal(self, first: str, second: str) -> bool:
        """Says whether two tensors have the same values, reading some rows of both at a time."""
        if self.shapes[first] != self.shapes[second]:
            return False
        shape = self.shapes[first]
        rows = 0
        if shape:
            rows = shape[0]
        size = math.prod(shape)
        step = max(1, rows * _COMPARED // max(size, 1))
        for start in range(0, rows, step):
            part = (slice(start, min(start + step, rows)),)
            if not np.array_equal(self.read(first, part), self.read(second, part)):
                return False
        return True


def write(
    folder: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    sizes: Mapping[str, int],
    *,
    shard_bytes: int,
) -> None:
    """Writes tensors, one in memory at a time, as one file, or as several with an index.

    Args:
      folder: The folder, which must exist.
      tensors: The name and the value of every tensor, in the order of `sizes`.
      sizes: The bytes of every tensor, by its name.
      shard_bytes: The most bytes of a file that has more than one tensor.
    """
    shards = _divide(sizes, shard_bytes)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE]
    for file, names in zip(files, shards, strict=True):
        _write_file(folder / file, tensors, {name: sizes[name] for name in names})
    if len(shards) > 1:
        index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _find(path: Path) -> dict[Path, list[str]]:
    """Returns the files, and the tensors that an index says are in each; none without an index.

    As for `transformers`, model.safetensors stands above an index beside it, which is often of an
    older version.
    """
    if path.is_file():
        return {path: []}
    if os.path.lexists(path / SINGLE):
        return {_linked(path, SINGLE): []}
    if os.path.lexists(path / INDEX):
        return _find_shards(path)
    others = sorted(
        file.name for ending in ("*.bin", "*.pth", "*.pt", "*.gguf") for file in path.glob(ending)
    )
    found = ""
    if others:
        found = f"; {listed(map(shown, others))} cannot be read, save them as safetensors first"
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        found = (
            f"; which tensors {listed(map(shown, shards))} should have is not known without {INDEX}"
        )
    raise ValueError(f"there is neither {SINGLE} nor {INDEX} in {path}{found}")


def _linked(folder: Path, name: str) -> Path:
    """Returns the path of a file of a folder, which may be a link."""
    try:
        return checked_file(folder, name)
    except FileNotFoundError as error:
        raise ValueError(f"{folder / name} is a link to a file that is missing") from error


def _find_shards(folder: Path) -> dict[Path, list[str]]:
    """Returns the files that an index names, with the tensors in each."""
    content = read_json(_linked(folder, INDEX))
    index = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(index, dict)
        or not index
        or not all(isinstance(name, str) for name in index.values())
    ):
        raise ValueError(
            f'{folder / INDEX} is not an index of tensors: it must have "weight_map", {{tensor: '
            f"file}}"
        )
    tensors: dict[str, list[str]] = {}
    for tensor, name in index.items():
        tensors.setdefault(name, []).append(tensor)
    files: dict[Path, list[str]] = {}
    problems = []
    for name in sorted(tensors):
        file = folder / name
        try:
            # that it is missing is said with what is wrong with the others
            with contextlib.suppress(FileNotFoundError):
                checked_file(folder, name, named_by=INDEX)
        except ValueError as error:
            problems.append(str(error))
        else:
            files[file] = [*files.get(file, ()), *tensors[name]]  # "a" and "./a" are one file
    if problems:
        raise ValueError(f"the tensors of {folder} cannot be read: {listed(problems)}")
    return files


def _read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the type and the shape of every tensor of a file."""
    try:
        with safe_open(file, framework="np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
            return {
                name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()
            }
    except FileNotFoundError as error:
        raise ValueError(f"{file.parent}/{shown(file.name)} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is cut short or damaged ({shown(str(error))})") from error


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


def _write_file(
    path: Path, tensors: Iterator[tuple[str, np.ndarray]], sizes: Mapping[str, int]
) -> None:
    """Writes the next tensors. Their shapes are known last, so the header is written into room that
    is left for it.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    # a multiple of 8, as tensors must be aligned
    room = 8 * (32 + sum(len(name) // 8 + 32 for name in sizes))
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
            # Not `tofile`, whose error on a full disk has no number. The view as bytes serves
            # bfloat16 as well.
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            offset += size
        text = json.dumps(header).encode()
        assert len(text) <= room
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
