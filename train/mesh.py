"""The devices of a run: their platform, and the data x context x model grid.

`open_platform` has to come before anything asks JAX for a device; `make_mesh` is the first that does.
"""

import jax
import numpy as np

import flaxasync as fa
from train.config import InputError, MeshConfig

CONTEXT = "context"
"""The axis that splits sequences; a mesh has it where mesh.context is more than 1."""
TOKENS = jax.P("data", None)
"""Sharding of every [batch, sequence] array: rows over `data`, the same on all of `model`; see `token_spec`."""


def open_platform(config: MeshConfig) -> None:
    """Chooses the platform, divides the CPU into devices, and joins the other processes if there are any."""
    if config.platform in ("cpu", "tpu"):  # "gpu" names a family, not a platform of JAX; make_mesh looks at what came
        jax.config.update("jax_platforms", config.platform)
    if config.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    if config.distributed:
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            raise InputError(
                "mesh.distributed is set, but the processes could not be joined: "
                f"{_first_line(error)}; set it where a TPU pod, SLURM or Open MPI starts the processes"
            ) from error


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """Returns the grid over all devices, with Explicit axes.

    Raises:
      InputError: there is no such platform, or the grid does not multiply to the number of devices.
    """
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise InputError(
            f"mesh.platform={config.platform} has no devices here: {_first_line(error)}; "
            "use --mesh.platform cpu to simulate them"
        ) from error
    if config.platform not in ("auto", devices[0].platform):
        raise InputError(
            f"mesh.platform={config.platform} was asked for, but JAX runs on {devices[0].platform}; "
            "use --mesh.platform auto, or install JAX for that platform"
        )
    kind = "simulated cpu" if devices[0].platform == "cpu" else devices[0].platform
    shape = grid(config, len(devices), kind)
    explicit = (jax.sharding.AxisType.Explicit,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=explicit, devices=devices)


def grid(config: MeshConfig, devices: int, kind: str = "") -> dict[str, int]:
    """Returns the axes and their sizes, or raises InputError when they do not multiply to `devices`.

    Heads are split between neighbours: their blocks travel at every matmul, those of a sequence once a layer.
    """
    data, model = fill_in(config.data, config.model, devices, kind, context=config.context)
    return {"data": data, CONTEXT: config.context, "model": model} if config.context > 1 else {
        "data": data, "model": model
    }  # fmt: skip


def token_spec(mesh: jax.sharding.Mesh) -> jax.P:
    """Sharding of every [batch, sequence] array on a mesh."""
    return jax.P("data", CONTEXT) if CONTEXT in mesh.shape else TOKENS


def sequence_order(mesh: jax.sharding.Mesh, config: MeshConfig, length: int) -> np.ndarray:
    """Returns the order in which the positions of a sequence lie on a mesh, int [length]."""
    return fa.sequence_order(config.context_layout, length, mesh.shape.get(CONTEXT, 1))


def fill_in(data: int, model: int, devices: int, kind: str = "", *, context: int = 1) -> tuple[int, int]:
    """Returns (data, model) with -1 inferred, or raises InputError when they and `context` do not multiply.

    >>> fill_in(-1, 4, 8)
    (2, 4)
    """
    if context < 1:
        raise InputError(f"mesh.context must be at least 1: got {context}")
    for name, size in (("data", data), ("model", model)):
        if size < 1 and size != -1:
            raise InputError(f"mesh.{name} must be at least 1, or -1 to infer it: got {size}")
    if data == model == -1:
        raise InputError("mesh.data and mesh.model are both -1: only one of them can be inferred")
    rest = devices // context
    inferred = (rest // model if data == -1 else data), (rest // data if model == -1 else model)
    if inferred[0] * inferred[1] * context != devices:
        split = f" x mesh.context={context}" if context > 1 else ""
        raise InputError(
            f"mesh.data={data}{split} x mesh.model={model} must multiply to the number of devices: "
            f"there are {devices} {kind} devices".replace("  ", " ")
            + ("; change the mesh, or mesh.cpu_devices" if "cpu" in kind else "; change the mesh")
        )
    return inferred


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
