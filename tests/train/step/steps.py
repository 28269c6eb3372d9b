"""A few training steps on batches that are easy to learn, for tests that compare losses."""

import jax
import numpy as np

from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import identify_run
from train.step.mesh import make_mesh, sequence_order, token_spec

STEPS = 20


def on_devices(config, sizes, replace, monkeypatch, **sections):
    """Returns the configuration and the mesh of a run on as many devices as (data, fsdp, context, model) need."""
    devices = jax.devices()[: int(np.prod(sizes))]
    names = ("data", "fsdp", "context", "model")
    changed = replace(config, mesh=dict(zip(names, sizes, strict=True)), **sections)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: devices)
        return changed, make_mesh(changed.mesh)


def batches(config, mesh, start, steps):
    """Yields batches in which each token is half of the one before it, which twenty steps can begin to learn."""
    order = sequence_order(mesh, config.mesh, config.data.sequence_length)
    sharding = jax.NamedSharding(mesh, token_spec(mesh))
    for step in range(start, start + steps):
        tokens = np.random.default_rng(step).integers(0, 64, (config.data.batch_size, 1))
        tokens = (tokens >> np.arange(config.data.sequence_length + 1) % 6).astype(np.int32)
        parts = [tokens[:, :-1], tokens[:, 1:]]
        if config.data.separator is not None:
            ends = parts[0] == config.data.separator
            parts.append((np.cumsum(ends, axis=1) - ends).astype(np.int32))
        yield tuple(jax.device_put(part[:, order], sharding) for part in parts)


def train(trainer, config, mesh, state, start, steps):
    """Returns the state after some steps, and the loss and the gradient norm of each of them."""
    history = []
    for batch in batches(config, mesh, start, steps):
        state, metrics = trainer.train_step(state, *batch)
        history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return state, history


def continue_run(config, mesh, trainer_of, folder, start, steps):
    """Continues a run from its checkpoint of step `start`, or begins it, and saves the last; returns as `train`."""
    identity = identify_run(config, {})
    with jax.set_mesh(mesh), Checkpoints(folder, keep=9) as checkpoints:
        trainer = trainer_of(config, mesh)
        state = checkpoints.restore(start, trainer.abstract_state(), identity)[0] if start else trainer.init()
        state, history = train(trainer, config, mesh, state, start, steps)
        checkpoints.save(start + steps, state, data={}, tokens=0, identity=identity)
    return state, history


def place(state, trainer):
    """Puts the arrays of a state on the devices of a trainer."""
    return jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), state, trainer.abstract_state())
