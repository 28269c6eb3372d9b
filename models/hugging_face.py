"""Parameters of other people's checkpoints: imported from safetensors onto any mesh, and exported.

`models.families` has the names. Nothing is ever in host memory as a whole: one tensor of one layer
is read at a time, and of it only the part that one device holds; it is put into the stack of all
layers on the devices. Export fetches one tensor at a time. The experts of a layer, which are
tensors of their own in the files, are such a tensor here.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from flaxasync.foreign_json import read_json
from models import safetensors_files
from models.config import TransformerConfig
from models.config_json import read_config, write_config
from models.families import Family
from models.family_defaults import Fields
from models.foreign_folder import checked_file, listed, shown
from models.safetensors_files import TensorFiles

SHARD_BYTES = 5 * 10**9
type Report = Callable[[str, int, int], None]  # the tensor, the bytes that are done, all bytes

_ADAPTER = "adapter_config.json"
_OUTPUT = "lm_head.weight"
# Tensors that some files have and that a model computes: the frequencies of rotary positions.
_COMPUTED = ("rotary_emb.inv_freq",)


def load_config(folder: Path) -> tuple[Family, Fields]:
    """Reads config.json of a folder: see `models.config_json.read_config`.

    Raises:
      ValueError: There is no such file, or it is not JSON.
      NotImplementedError: The family, or an option, is not supported.
    """
    try:
        file = checked_file(folder, "config.json")
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} must be a folder with config.json and safetensors files: there is no "
            "config.json"
        ) from error
    if os.path.lexists(folder / _ADAPTER):
        raise NotImplementedError(
            f"{folder} has {_ADAPTER}, so that its parameters are those of a model and of an "
            "adapter; merge the two first, or remove that file"
        )
    return read_config(read_json(file))


def import_parameters(
    files: TensorFiles, family: Family, abstract: PyTree, report: Report = lambda *_: None
) -> PyTree:
    """Reads the parameters of a checkpoint onto the devices that hold them.

    Args:
      files: The tensors.
      family: The names of the tensors.
      abstract: Shape, dtype and sharding of every parameter of the model, nested by its names, as
        `jax.eval_shape` and `nnx.to_pure_dict` give them. Values are cast to these dtypes.
      report: Called after every tensor.

    Returns:
      The parameters, as `abstract`.

    Raises:
      ValueError: Tensors are missing, left over or of another shape, or a file is damaged. All of
        them are named, and none was loaded.
    """
    leaves, tree = jax.tree.flatten_with_path(abstract)
    with jax.set_mesh(_mesh_of(leaves[0][1])):
        names = {_name(path): leaf for path, leaf in leaves}
        _check(files, family, names)
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in names.values())
        done = 0
        values = []
        for name, leaf in names.items():
            value = _import_one(files, family.tensors[name], name, leaf)
            done += leaf.size * leaf.dtype.itemsize
            report(name, done, total)
            values.append(value)
    return jax.tree.unflatten(tree, values)


def export_parameters(
    folder: Path,
    config: TransformerConfig,
    params: PyTree,
    *,
    length: int,
    dtype: DTypeLike | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Report = lambda *_: None,
) -> dict[str, object]:
    """Writes parameters as safetensors, under the names of the family that the architecture belongs
    to.

    Args:
      folder: The folder, which must exist.
      config: The architecture.
      params: The parameters, nested by their names.
      length: The longest sequence that the model is meant for (tokens).
      dtype: The dtype in the files; by default that of each parameter.
      shard_bytes: The most bytes of a file.
      report: Called after every tensor.

    Returns:
      What belongs into config.json.

    Raises:
      NotImplementedError: No family has these options, or several processes hold the parameters.
    """
    if jax.process_count() > 1:
        raise NotImplementedError(
            "export needs all parameters in one process; run it in a process of its own"
        )
    family, written = write_config(config, length=length)
    named = {_name(path): leaf for path, leaf in jax.tree.flatten_with_path(params)[0]}
    sizes: dict[str, int] = {}
    for name, leaf in named.items():
        theirs = _their_names(family.tensors[name], leaf)
        sizes |= dict.fromkeys(
            theirs, leaf.size * np.dtype(dtype or leaf.dtype).itemsize // len(theirs)
        )
    tensors = _fetch_all(family, named, dtype, sum(sizes.values()), report)
    safetensors_files.write(folder, tensors, sizes, shard_bytes=shard_bytes)
    stored = {str(np.dtype(dtype or leaf.dtype)) for leaf in named.values()}
    if len(stored) > 1:
        stored = {"float32"}
    return {**written, "dtype": stored.pop()}


def _check(files: TensorFiles, family: Family, names: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ValueError unless the files have exactly the tensors that the parameters need, in
    their shapes.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for name, leaf in names.items():
        if name not in family.tensors:
            raise NotImplementedError(
                f"the table of {family.model_type} in models/families.py has no {name}"
            )
        template = family.tensors[name]
        shape = tuple(leaf.shape[_stacked_dims(template) :])
        if _is_transposed(name, template):
            shape = shape[::-1]
        needed |= dict.fromkeys(_their_names(template, leaf), shape)
    is_tied = "output.kernel" not in names
    there = {name for name in files.shapes if not name.endswith(_COMPUTED)}
    if is_tied:
        there.discard(_OUTPUT)
    problems = [f"missing: {name} {list(needed[name])}" for name in sorted(needed.keys() - there)]
    problems += [
        f"left over: {shown(name)} {list(files.shapes[name])}"
        for name in sorted(there - needed.keys())
    ]
    problems += [
        f"{name} is {list(files.shapes[name])} and must be {list(needed[name])}"
        for name in sorted(needed.keys() & there)
        if files.shapes[name] != needed[name]
    ]
    if problems:
        raise ValueError(
            f"the tensors of {files.path} are not those of this {family.model_type}, nothing was "
            "loaded: " + listed(problems)
        )
    embedding = family.tensors["embed.embedding"]
    if is_tied and _OUTPUT in files.shapes and not files.are_equal(_OUTPUT, embedding):
        raise ValueError(
            f"{_OUTPUT} of {files.path} differs from {embedding}, although tie_word_embeddings of "
            f"config.json, or its default for a {family.model_type}, says that they are one: "
            "`transformers` then uses both; write false there to import both, or remove the tensor"
        )


def _import_one(
    files: TensorFiles, template: str, name: str, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """Reads a parameter: one tensor, or one of each layer, which are stacked on the devices."""
    read = functools.partial(_read, files, transposed=_is_transposed(name, template))
    stacked = leaf.shape[: _stacked_dims(template)]
    names = np.reshape(_their_names(template, leaf), stacked).tolist()
    if not _is_stacked(template):
        return _make_sharded(functools.partial(read, names), leaf.shape, leaf.sharding, leaf.dtype)
    spec = P(*leaf.sharding.spec[1:])
    sharding = NamedSharding(leaf.sharding.mesh, spec)
    stack = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    for layer, of_layer in enumerate(names):
        part = _make_sharded(
            functools.partial(read, of_layer), leaf.shape[1:], sharding, leaf.dtype
        )
        stack = _put_layer(stack, part, np.int32(layer))
    return stack


def _read(
    files: TensorFiles, names: str | list[str], index: tuple[slice, ...], *, transposed: bool
) -> np.ndarray:
    """Reads a part of a tensor, or of the stack of several, as it is here."""
    if isinstance(names, list):
        return np.stack(
            [_read(files, name, index[1:], transposed=transposed) for name in names[index[0]]]
        )
    if transposed:
        return files.read(names, index[::-1]).T
    return files.read(names, index)


def _make_sharded(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    shape: tuple[int, ...],
    sharding: NamedSharding,
    dtype: DTypeLike,
) -> jax.Array:
    """Makes a sharded array of what is read, one part of it in host memory at a time."""
    parts: dict[tuple[slice, ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        parts.setdefault(tuple(index), []).append(device)
    arrays = []
    for index, devices in parts.items():
        value = np.ascontiguousarray(read(index).astype(dtype, copy=False))
        arrays += [jax.device_put(value, device) for device in devices]
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, part: jax.Array, layer: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, part, layer, 0)


@jax.jit
def _take_layer(stack: jax.Array, layer: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False)


def _fetch_all(
    family: Family,
    named: Mapping[str, jax.Array],
    dtype: DTypeLike | None,
    total: int,
    report: Report,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of all parameters in host memory, one at a time."""
    done = 0
    for name, leaf in named.items():
        template = family.tensors[name]
        names = iter(_their_names(template, leaf))
        for fetched in _fetch_tensors(leaf, template):
            value = fetched
            if _is_transposed(name, template):
                value = fetched.T
            value = value.astype(dtype or value.dtype, order="C")
            done += value.nbytes
            report(name, done, total)
            yield next(names), value


def _fetch_tensors(leaf: jax.Array, template: str) -> Iterator[np.ndarray]:
    """Yields what is a tensor of its own in the files: a parameter, one layer of it, or one expert
    of that.
    """
    if not _is_stacked(template):
        yield np.asarray(leaf)
        return
    for layer in range(leaf.shape[0]):
        with jax.set_mesh(_mesh_of(leaf)):
            fetched = np.asarray(_take_layer(leaf, np.int32(layer)))
        if "{expert}" in template:
            yield from fetched
        else:
            yield fetched


def _mesh_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.sharding.Mesh:
    assert isinstance(leaf.sharding, NamedSharding)
    assert isinstance(leaf.sharding.mesh, jax.sharding.Mesh)
    return leaf.sharding.mesh


def _name(path: tuple[object, ...]) -> str:
    """Returns the name of a parameter, with dots."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


def _is_stacked(template: str) -> bool:
    return "{layer}" in template


def _stacked_dims(template: str) -> int:
    """Returns how many dimensions of a parameter are stacks: of layers, and of experts."""
    return template.count("{")


def _is_transposed(name: str, template: str) -> bool:
    return name.endswith(".kernel") or "{expert}" in template


def _their_names(template: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> list[str]:
    indices = np.ndindex(leaf.shape[: _stacked_dims(template)])
    return [
        template.format(**dict(zip(("layer", "expert"), index, strict=False))) for index in indices
    ]
