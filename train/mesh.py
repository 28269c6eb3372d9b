"""The devices of a run: their platform, and the mesh of data x context x model.

`configure_jax` must be called before anything asks JAX for a device; `make_mesh` is the first function that does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import flaxasync as fa
from models.config import check_fits
from train.config import Config, MeshConfig
from train.errors import InputError, RestartError

CONTEXT = "context"
"""Name of the mesh axis that splits sequences. A mesh has this axis only if mesh.context is more than 1."""


def configure_jax(config: MeshConfig) -> None:
    """Selects the platform, divides the CPU into devices, and joins the other processes if there are any.

    Raises:
      InputError: There is nothing here that tells which processes to join.
      RestartError: The processes could not be joined.
    """
    # JAX has no platform called "gpu", only "cuda" and "rocm"; make_mesh checks which devices JAX found.
    if config.platform in ("cpu", "tpu"):
        jax.config.update("jax_platforms", config.platform)
    if config.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    if config.distributed:
        try:
            jax.distributed.initialize()
        except jax.errors.JaxRuntimeError as error:
            raise RestartError(
                f"the processes of the run could not join each other: {_first_line(error)}; start all of them again"
            ) from error
        except (ValueError, RuntimeError) as error:
            raise InputError(
                "mesh.distributed is set, but the processes could not be joined: "
                f"{_first_line(error)}; set it where a TPU pod, SLURM or Open MPI starts the processes"
            ) from error


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """Makes the mesh of a run over all devices of this machine, or of all its processes.

    Raises:
      InputError: JAX has no devices of that platform, or the axis sizes do not multiply to the number of devices.
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
            f"mesh.platform={config.platform} was requested, but JAX runs on {devices[0].platform}; "
            "use --mesh.platform auto, or install JAX for that platform"
        )
    kind = "simulated cpu" if devices[0].platform == "cpu" else devices[0].platform
    return mesh_over(devices, config, kind)


def mesh_over(devices: Sequence[Any], config: MeshConfig, kind: str) -> jax.sharding.Mesh:
    """Makes the mesh over devices that are present, or that a dry run describes, with Explicit axes.

    Both go through this one function, so that the program of a dry run is the program of the run.

    Args:
      devices: The devices, all of which the mesh takes.
      config: The requested sizes.
      kind: The kind of device that error messages name, such as "tpu".

    Raises:
      InputError: The sizes do not multiply to the number of devices, or a ring would lie across slices.
    """
    shape = mesh_shape(config, len(devices), kind)
    try:
        return fa.make_mesh(tuple(shape.values()), tuple(shape), devices=devices)
    except ValueError as error:
        raise InputError(str(error)) from error


def mesh_shape(config: MeshConfig, devices: int, kind: str = "") -> dict[str, int]:
    """Returns the axis names of the mesh and their sizes, major axis first.

    The model axis is the minor one, whose devices are neighbours: its blocks travel at every matmul, those of the
    context axis only once per layer.

    Args:
      config: The requested sizes, of which one may be -1.
      devices: The number of devices.
      kind: The kind of device that error messages name, such as "tpu".

    Raises:
      InputError: The sizes do not multiply to `devices`.
    """
    data, model = infer_sizes(config.data, config.model, devices, kind, context=config.context)
    return {"data": data} | ({CONTEXT: config.context} if config.context > 1 else {}) | {"model": model}


def token_spec(mesh: jax.sharding.Mesh) -> jax.P:
    """Returns the sharding of every [batch, sequence] array; such an array is replicated over the model axis."""
    return jax.P("data", CONTEXT if CONTEXT in mesh.shape else None)


def sequence_order(mesh: jax.sharding.Mesh, config: MeshConfig, length: int) -> np.ndarray:
    """Returns the position of each token in the order in which the mesh lays a sequence out, int [length]."""
    return fa.sequence_order(config.context_layout, length, mesh.shape.get(CONTEXT, 1))


def check_fits_mesh(config: Config, shape: Mapping[str, int]) -> None:
    """Checks that the model, its sequences and the batch divide evenly over a mesh.

    Args:
      config: The run.
      shape: Axis names of the mesh and their sizes.

    Raises:
      InputError: Something does not divide; the message names the sizes.
    """
    try:
        check_fits(
            config.model,
            sequence_length=config.data.sequence_length,
            mesh_shape=shape,
            context_layout=config.mesh.context_layout,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    if config.data.batch_size % shape["data"]:
        raise InputError(
            f"data.batch_size must be divisible by the 'data' axis: got {config.data.batch_size} on "
            f"{shape['data']} devices"
        )


def infer_sizes(data: int, model: int, devices: int, kind: str = "", *, context: int = 1) -> tuple[int, int]:
    """Infers the data or the model size that is -1, and checks that all sizes multiply to the number of devices.

    >>> infer_sizes(-1, 4, 8)
    (2, 4)

    Returns:
      The sizes of the data and of the model axis.

    Raises:
      InputError: A size is not positive, both are -1, or the sizes do not multiply to `devices`.
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
