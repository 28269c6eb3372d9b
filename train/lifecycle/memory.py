"""Refuses a run that cannot fit the memory, before a program of impossible sizes is compiled.

What is compared is the least that a run needs, so that a run which passes may still need more than
there is.
"""

import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from train.config import Config
from train.lifecycle.errors import InputError
from train.metrics.output import gib
from train.step.trainer import Trainer

# Where Linux has the limit of a container, in the second and in the first version of its control
# groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_memory(trainer: Trainer, config: Config, mesh: jax.sharding.Mesh) -> None:
    """Checks that the memory of a device, or of a host whose devices are simulated, has what a run
    needs at least.
    """
    needs = least_bytes(trainer, config, mesh)
    device = mesh.local_devices[0]
    has: int | None
    if device.platform == "cpu":
        where = "this host"
        has = host_memory()
        needs = {name: size * len(mesh.local_devices) for name, size in needs.items()}
    else:
        where = "a device"
        has = (device.memory_stats() or {}).get("bytes_limit")
    if has is None or sum(needs.values()) <= has:
        return
    parts = ", ".join(f"{gib(size)} for {name}" for name, size in needs.items())
    raise InputError(
        f"the run must fit the memory of {where}, which has {gib(has)}: it needs at least {parts}; "
        f"use smaller fields of model, a smaller data.batch_size than {config.data.batch_size}, or "
        "more devices"
    )


def least_bytes(trainer: Trainer, config: Config, mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Returns what each device needs at least, in bytes by what it is for."""
    state = trainer.abstract_state()
    tokens = config.data.batch_size * config.data.sequence_length // config.data.microbatches
    layer_input = tokens * config.model.width * jnp.dtype(config.model.dtype).itemsize
    return {
        "the parameters, their gradients and the optimizer's state": bytes_on_device(state)
        + bytes_on_device(state.params),
        "the tokens of a batch": bytes_on_device(trainer.abstract_batch()),
        "the input of a layer": layer_input // mesh.size,
    }


def host_memory() -> int:
    """Returns the bytes of memory of this host, or of the container in which the process runs."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in _LIMITS:
        try:
            text = limit.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # "max" is none
            sizes.append(int(text))
    return min(sizes)


def bytes_on_device(tree: PyTree) -> int:
    """Returns the bytes that the arrays of a tree, which may be abstract, occupy on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total
