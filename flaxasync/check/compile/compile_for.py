"""Compile for a TPU topology with no TPU present: `topology_mesh` and `compile_for`.

The caller's process traces and lowers; a child process compiles, because libtpu can end its process (a segmentation
fault on some kernels, an arithmetic fault on some names). The child stays for the next call; a new one is started
when it dies or when dumps are wanted, whose flags libtpu reads only when it loads. The program is the one that
jax.jit would compile on that topology, instruction for instruction; it cannot be run here.
"""

import contextlib
import dataclasses
import importlib.util
import io
import os
import pathlib
import re
import tempfile
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from flaxasync.check.compile.mesh_order import ordered_devices
from flaxasync.check.compile.process import ENVIRONMENT, busy_message, shared_process

# Topologies that libtpu 0.0.51 describes; chips, not cores (a tpu7x chip is two devices).
TOPOLOGIES = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "8x8x8"),
    "tpu7x": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
}
COMPILE_SECONDS = 600  # an 8B training step takes a minute; ten times that is a hang
# For who reads the HLO and not the code: the compiler unrolls no loops in the code of fusions. 55 small programs took
# it 24 s of processor time instead of 63; large matmuls gain little. The HLO is the same, but for the scratch bytes
# that a fusion is said to use; cost and memory, too, but for the bytes of the code, which is smaller and slower.
HLO_ONLY = types.MappingProxyType({"xla_tpu_enable_emitter_rolling": "true"})
MAX_CHIPS = 9216

_NAME = re.compile(r"([a-z0-9]+):([1-9]\d{0,3})x([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the TPU compiler made of a function, on one device of the topology."""

    text: str
    topology: str
    memory: Mapping[str, int]  # the *_in_bytes of jax's memory_analysis, per device
    cost: Mapping[str, float]
    coords: tuple[tuple[int, ...], ...]  # the chip of each partition, in the mesh's order
    dumps: pathlib.Path | None = None

    @property
    def chip(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes a device needs: arguments, outputs that are no donated argument, temporaries, code; and their total."""
        m = self.memory
        kinds = {
            "arguments": m["argument_size_in_bytes"],
            "outputs": m["output_size_in_bytes"] - m["alias_size_in_bytes"],
            "temporaries": m["temp_size_in_bytes"],
            "code": m["generated_code_size_in_bytes"],
        }
        return kinds | {"total": sum(kinds.values())}

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> Any:
        return types.SimpleNamespace(**self.memory)

    def cost_analysis(self) -> dict[str, float]:
        return dict(self.cost)


def topology_mesh(
    topology: str, axis_shapes: Sequence[int], axis_names: Sequence[str], *, axis_types: Any = None
) -> Mesh:
    """Returns a mesh over the devices of a topology, neighbours on a mesh axis being neighbours on the chip network.

    Args:
      topology: "v5e:2x4", "v5p:2x2x2", ...: family and chips per dimension.
      axis_shapes: devices per mesh axis; they must multiply to the topology's devices.
      axis_names: one name per axis.
      axis_types: as for jax.sharding.Mesh; Auto when None.

    Raises:
      ValueError: the topology is unknown, or the axes do not multiply to it.
      ImportError: libtpu is not installed.
    """
    devices = _devices(topology)
    shape, names = tuple(axis_shapes), tuple(axis_names)
    if len(shape) != len(names):
        raise ValueError(f"axis_names needs one name per axis: got {names} for axis_shapes {shape}")
    if np.prod(shape) != len(devices):
        raise ValueError(
            f"axis_shapes must multiply to the {len(devices)} devices of {topology}: got {shape}, which is "
            f"{np.prod(shape)}; change the mesh, or choose a topology of that size"
        )
    return Mesh(ordered_devices(devices, shape), names, axis_types=axis_types)


def topology_size(topology: str) -> int:
    """Returns the number of devices of a topology; a tpu7x chip is two. Raises as `topology_mesh`."""
    return len(_devices(topology))


def compile_for(
    topology: str,
    fn: Callable,
    *args: Any,
    keep_dumps: bool | str | os.PathLike = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = COMPILE_SECONDS,
) -> CompiledProgram:
    """Compiles a function for a TPU topology, in a child process, with no TPU.

    Args:
      topology: "v5e:2x4", "v5p:2x2x2", ...
      fn: a jitted function, or a function of global arrays.
      *args: arrays or jax.ShapeDtypeStruct, or pytrees of them. Shardings on a `topology_mesh` are taken as they are;
        those on another mesh of the same size (8 CPU devices) are moved to the topology, which is then also the ambient
        mesh while `fn` is traced. Shardings on an AbstractMesh (of `nnx.eval_shape`) go where those of a mesh with the
        same axes go. Arguments without any sharding compile for one chip, unless a mesh is ambient.
      keep_dumps: True, or a folder: also writes libtpu's final bundle dumps there (`.dumps`; the caller deletes it).
      compiler_options: libtpu's own options, as for `Lowered.compile`; `HLO_ONLY` compiles sooner where the code that
        the HLO becomes is not wanted.
      timeout: seconds after which the child is ended.

    Returns:
      The program: `.as_text()`, `.memory_analysis()`, `.bytes_by_kind`, `.cost_analysis()`, `.dumps`.

    Raises:
      ValueError: the topology is unknown, or does not multiply to the mesh, or the arguments lie on several meshes.
      ImportError: libtpu is not installed.
      HbmError: the program does not fit in the memory of a device; a RuntimeError with `.needed` and `.available`.
      RuntimeError: the compiler refused the program, crashed (names the signal), or did not finish.
    """
    devices = _devices(topology)
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    args, mesh = _place(topology, devices, args)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        lowered = jitted.lower(*args)
    request = _request(topology, lowered, dict(compiler_options or {}))
    known = {d.id for d in devices}
    if len(request["device_ids"]) > len(devices) or not known.issuperset(request["device_ids"]):
        raise ValueError(
            f"the function was lowered for {len(request['device_ids'])} devices that are not those of {topology}: "
            f"make its mesh with topology_mesh({topology!r}, ...), or let it use the ambient mesh"
        )
    folder = None
    if keep_dumps:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="flaxasync-") if keep_dumps is True else keep_dumps).absolute()
    answer = shared_process(dumps=folder is not None).compile(request, timeout, folder)
    coords = {d.id: tuple(d.coords) for d in devices}
    return CompiledProgram(
        answer["text"],
        topology,
        answer["memory"],
        answer["cost"],
        tuple(coords[i] for i in request["device_ids"]),
        folder,
    )


def _devices(topology: str) -> list:
    """Returns the devices of a topology, or says which topologies there are."""
    match = _NAME.fullmatch(topology) if isinstance(topology, str) else None
    known = "; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in TOPOLOGIES.items())
    wanted = f"topology must be one that libtpu describes, like 'v5e:2x4': got {topology!r}; there are {known}"
    if not match or match[1] not in TOPOLOGIES or np.prod([int(n) for n in match.groups()[1:] if n]) > MAX_CHIPS:
        raise ValueError(wanted)
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError("compiling for a TPU needs libtpu, no TPU: install flaxasync with its 'tpu' or 'dev' extra")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(topology, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        if "lock" in str(error) or "in use" in str(error):
            raise RuntimeError(busy_message(error)) from error
        raise ValueError(f"{wanted} ({error})") from error


def _place(topology: str, devices: list, args: tuple) -> tuple[tuple, Mesh | None]:
    """Moves shardings onto the topology; returns the arguments and, if any was moved, the mesh to trace under."""
    leaves, tree = jax.tree.flatten(args)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = [s for s in shardings if isinstance(s, NamedSharding)]
    moved = _targets(topology, devices, {s.mesh: None for s in named})
    ambient = jax.sharding.get_mesh()
    if not named and not ambient.empty and not _describes(ambient, devices) and ambient.size == len(devices):
        moved[ambient] = topology_mesh(topology, ambient.axis_sizes, ambient.axis_names, axis_types=ambient.axis_types)
    alone = not named and not moved and (ambient.empty or not _describes(ambient, devices))
    lone = SingleDeviceSharding(devices[0]) if alone else None

    def place(leaf: Any, sharding: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            mesh = moved.get(sharding.mesh)
            if mesh is None and isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            sharding = sharding if mesh is None else NamedSharding(mesh, sharding.spec)
        elif lone is not None:
            sharding = lone
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        else:
            sharding = None
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        weak = getattr(aval, "weak_type", False)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)

    placed = jax.tree.unflatten(tree, [place(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)])
    return placed, next(iter(moved.values()), None)


def _targets(topology: str, devices: list, meshes: Collection[Any]) -> dict[Any, Mesh]:
    """Returns the mesh of the topology that each mesh of the arguments moves to; those that are one already are not in.

    Raises:
      ValueError: a mesh is not of the topology's size, or they would move to more than one.
    """
    moved: dict[Any, Mesh] = {}
    ambient = jax.sharding.get_mesh()
    here = [ambient] if not ambient.empty and _describes(ambient, devices) and ambient.size == len(devices) else []
    for mesh in meshes:
        if mesh.size != len(devices):
            raise ValueError(
                f"the mesh must have the {len(devices)} devices of {topology}: got {dict(mesh.shape)}, which is "
                f"{mesh.size}; use topology_mesh({topology!r}, ...) or another topology"
            )
        if _describes(mesh, devices):
            here.append(mesh)
    for mesh in meshes:
        if mesh not in here:
            known = (m for m in (*here, *moved.values()) if _axes(m) == _axes(mesh))
            moved[mesh] = next(known, None) or topology_mesh(topology, mesh.axis_sizes, mesh.axis_names,
                                                             axis_types=mesh.axis_types)  # fmt: skip
    if moved and len({*here, *moved.values()}) > 1:
        described = ", ".join(dict.fromkeys(str(dict(m.shape)) for m in (*here, *moved.values())))
        raise ValueError(
            f"the arguments must lie on one mesh: got {described}; give all of them shardings on the same "
            f"topology_mesh({topology!r}, ...), or on an AbstractMesh with its axes"
        )
    return moved


def _axes(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return mesh.axis_names, mesh.axis_sizes


def _describes(mesh: Any, devices: list) -> bool:
    """Says whether a mesh is one of devices like these, which only a topology has."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "tpu":
        return False
    first = mesh.devices.flat[0]
    return type(first.client) is type(devices[0].client) and first.device_kind == devices[0].device_kind


def _request(topology: str, lowered: Any, compiler_options: dict) -> dict:
    """Packs a lowered function for the worker, with the options that `lowered.compile()` would use."""
    from jax._src.interpreters import pxla

    lowering = lowered._lowering
    facts = lowering.compile_args
    if facts["host_callbacks"] or facts["ordered_effects"]:
        raise NotImplementedError(
            "compile_for cannot compile host callbacks: take io_callback, pure_callback and debug.print out of it"
        )
    devices = tuple(lowering._device_list)
    to_inputs, to_outputs = pxla.get_prop_to_input_output(facts["in_shardings"], facts["out_shardings"], 0)
    options = dict(lowering._compiler_options_kvs) | compiler_options
    module = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(module)
    compile_options = pxla.create_compile_options(
        lowered.compiler_ir("stablehlo"), facts["tuple_args"], to_inputs, to_outputs, facts["backend"],
        np.array(devices, dtype=object), options,
    )  # fmt: skip
    return {
        "topology": topology,
        "module": module.getvalue(),
        "options": compile_options.SerializeAsString(),
        "device_ids": [d.id for d in devices],
    }
