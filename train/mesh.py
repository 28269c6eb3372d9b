"""The devices of a run: their platform, and the data x model grid.

`open_platform` has to come before anything asks JAX for a device; `make_mesh` is the first that does.
"""

import jax

from train.config import InputError, MeshConfig

AXES = ("data", "model")
TOKENS = jax.P("data", None)
"""Sharding of every [batch, sequence] array: rows over `data`, the same on all of `model`."""


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
    shape = fill_in(config.data, config.model, len(devices), kind)
    return jax.make_mesh(shape, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * 2, devices=devices)


def fill_in(data: int, model: int, devices: int, kind: str = "") -> tuple[int, int]:
    """Returns (data, model) with -1 inferred, or raises InputError when they do not multiply to `devices`.

    >>> fill_in(-1, 4, 8)
    (2, 4)
    """
    for name, size in (("data", data), ("model", model)):
        if size < 1 and size != -1:
            raise InputError(f"mesh.{name} must be at least 1, or -1 to infer it: got {size}")
    if data == model == -1:
        raise InputError("mesh.data and mesh.model are both -1: only one of them can be inferred")
    inferred = (devices // model if data == -1 else data), (devices // data if model == -1 else model)
    if inferred[0] * inferred[1] != devices:
        raise InputError(
            f"mesh.data={data} x mesh.model={model} must multiply to the number of devices: "
            f"there are {devices} {kind} devices".replace("  ", " ")
            + ("; change the mesh, or mesh.cpu_devices" if "cpu" in kind else "; change the mesh")
        )
    return inferred


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
