"""The devices of a run: their platform, and the mesh of data x fsdp x context x model.

`configure_jax` must be called before anything asks JAX for a device; `make_mesh` is the first
function that does.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

import flaxasync as fa
from models.config import TransformerConfig, check_fits
from train.config import Config, MeshConfig
from train.lifecycle.errors import (
    InputError,
    RestartError,
    as_input_errors,
    first_line,
    is_of_lost_process,
)

FSDP = "fsdp"
CONTEXT = "context"
"""Names of the mesh axes that split stored parameters, and sequences. A mesh has them only if they
are more than 1.
"""
AXES = ("data", FSDP, CONTEXT, "model")


def configure_jax(config: MeshConfig) -> None:
    """Selects the platform, divides the CPU into devices, and joins the other processes if there
    are any.

    Raises a RestartError if these could not be joined, and an InputError if nothing here tells
    which they are.
    """
    # JAX has no platform called "gpu", only "cuda" and "rocm"; make_mesh checks which devices JAX
    # found.
    if config.platform in ("cpu", "tpu"):
        jax.config.update("jax_platforms", config.platform)
    if config.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    if config.distributed:
        try:
            jax.distributed.initialize(
                heartbeat_timeout_seconds=math.ceil(config.heartbeat_seconds)
            )
        except jax.errors.JaxRuntimeError as error:
            raise RestartError(
                f"the processes of the run could not join each other: {first_line(error)}; start "
                "all of them again"
            ) from error
        except (ValueError, RuntimeError) as error:
            raise InputError(
                "mesh.distributed is set, but the processes could not be joined: "
                f"{first_line(error)}; set it where a TPU pod, SLURM or Open MPI starts the "
                "processes"
            ) from error


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """Makes the mesh of a run over all devices of this machine, or of all its processes."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        # Processes tell each other of their devices, and one of them may end meanwhile: `exit_code`
        # explains that, and a supervisor starts all of them again.
        if config.distributed and is_of_lost_process(error):
            raise
        raise InputError(no_devices(config.platform, first_line(error))) from error
    found = devices[0].platform
    if config.platform not in ("auto", found):
        raise InputError(
            f"mesh.platform={config.platform} was requested, but JAX runs on {found}: use auto or "
            f"{found}"
        )
    return mesh_over(devices, config, "simulated cpu" if found == "cpu" else found)


def no_devices(platform: str, said: str) -> str:
    """Says in a sentence that a platform has no devices here, from what JAX said about that."""
    cause = said.partition(" (set JAX_PLATFORMS")[0].removesuffix(".")
    dry_run = ", or plan with --dry-run --topology v5e:2x4" if platform == "tpu" else ""
    return (
        f"mesh.platform={platform} has no devices here ({cause}); use --mesh.platform cpu{dry_run}"
    )


def mesh_over(devices: Sequence[jax.Device], config: MeshConfig, kind: str) -> jax.sharding.Mesh:
    """Makes the mesh of a run or a dry run over devices, with Explicit axes; messages name their
    `kind`, like "tpu".
    """
    shape = mesh_shape(config, len(devices), kind)
    with as_input_errors(ValueError):  # a ring would lie across slices
        return fa.make_mesh(tuple(shape.values()), tuple(shape), devices=devices)


def mesh_shape(config: MeshConfig, devices: int, kind: str = "") -> dict[str, int]:
    """Returns the axis names of the mesh and their sizes, major axis first.

    The model axis is the minor one, whose devices are neighbours: its blocks travel at every
    matmul, those of the other axes only once per layer or step.
    """
    sizes = infer_sizes(axis_sizes(config), devices, kind)
    return {name: size for name, size in sizes.items() if size > 1 or name not in (FSDP, CONTEXT)}


def axis_sizes(config: MeshConfig) -> dict[str, int]:
    """Returns the sizes of all four axes as they were requested, one of which may be -1."""
    return {axis: getattr(config, axis) for axis in AXES}


def token_spec(mesh: jax.sharding.Mesh) -> jax.P:
    """Returns the sharding of every [batch, sequence] array; such an array is replicated over the
    model axis.
    """
    return jax.P(
        ("data", FSDP) if FSDP in mesh.shape else "data", CONTEXT if CONTEXT in mesh.shape else None
    )


def batch_shards(shape: Mapping[str, int]) -> int:
    """Returns the number of shards of a batch, from the axis names of a mesh and their sizes."""
    return shape["data"] * shape.get(FSDP, 1)


def check_fits_mesh(config: Config, shape: Mapping[str, int]) -> None:
    """Checks that the model, its sequences and the batch divide evenly over a mesh of this
    shape.
    """
    _check_fits_model(config, config.model, config.data.sequence_length, shape)
    batch = config.data.batch_size
    unit = batch_shards(shape) * config.data.microbatches
    if batch % unit:
        lower = batch // unit * unit
        possible = " or ".join(str(size) for size in (lower, lower + unit) if size)
        if config.data.microbatches > 1:
            possible += ", or fewer data.microbatches"
        raise InputError(
            "data.batch_size must be divisible by mesh.data x mesh.fsdp x data.microbatches = "
            f"{unit}: got {batch}; use {possible}"
        )


def check_host_memory(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Checks that the devices of a mesh can use the memory of their host if the run offloads to
    it.
    """
    device = mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if (config.model.remat or "").startswith("offload") and "pinned_host" not in kinds:
        raise InputError(
            f"model.remat={config.model.remat} needs the memory 'pinned_host' of the host, which "
            f"{device.platform} devices here lack (they have {', '.join(kinds)}); use "
            "--model.remat layer, or cheap if memory allows it"
        )


def open_model_mesh(config: Config) -> jax.sharding.Mesh:
    """Opens the devices and makes the mesh of a command without batches, which must divide the
    model alone.
    """
    configure_jax(config.mesh)
    mesh = make_mesh(config.mesh)
    # one that every such mesh divides
    length = 2 * mesh.shape["model"] * mesh.shape.get(CONTEXT, 1)
    _check_fits_model(
        config, dataclasses.replace(config.model, fsdp_overlap="xla"), length, mesh.shape
    )
    return mesh


def _check_fits_model(
    config: Config, model: TransformerConfig, length: int, shape: Mapping[str, int]
) -> None:
    with as_input_errors(ValueError):
        check_fits(
            model,
            sequence_length=length,
            mesh_shape=shape,
            context_layout=config.mesh.context_layout,
        )


def infer_sizes(sizes: Mapping[str, int], devices: int, kind: str = "") -> dict[str, int]:
    """Infers the size that is -1, and checks that all sizes multiply to the number of devices.

    >>> infer_sizes({"data": -1, "model": 4}, 8)
    {'data': 2, 'model': 4}
    """
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise InputError(f"mesh.{name} must be at least 1, or -1 to infer it: got {size}")
    unknown = [f"mesh.{name}" for name, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        raise InputError(f"{' and '.join(unknown)} are both -1: only one of them can be inferred")
    rest = devices // math.prod(size for size in sizes.values() if size != -1)
    inferred = {name: rest if size == -1 else size for name, size in sizes.items()}
    if math.prod(inferred.values()) != devices:
        named = [
            f"mesh.{name}={size}"
            for name, size in sizes.items()
            if size != 1 or name in ("data", "model")
        ]
        remedy = "change the mesh"
        if "cpu" in kind:
            remedy += ", or simulate another number with --mesh.platform cpu --mesh.cpu_devices N"
        there = " ".join(filter(None, [str(devices), kind, "devices"]))
        raise InputError(
            f"{' x '.join(named)} must multiply to the number of devices: there are {there}; "
            f"{remedy}"
        )
    return inferred
