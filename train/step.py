"""One training step, one validation step, and the state they work on.

The state is a plain pytree of sharded arrays: what `nnx.split` leaves of the model, the optimizer's moments, the step
and the random key. Its parts keep the names of the model's attributes, which are the names in a checkpoint.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.transformer import Transformer
from train.config import Config
from train.mesh import CONTEXT, token_spec
from train.optimizer import make_optimizer, make_schedule


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "step", "key"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything on the devices that a checkpoint holds.

    Attributes:
      params: nested dict of the model's parameters.
      opt_state: optax's state; its moments are sharded as the parameters are.
      step: int32 scalar, updates done (steps).
      key: uint32 [2], the run's random key; what is drawn at a step folds the step in.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


class Trainer:
    """The programs of a run. Needs the mesh to be the ambient one (`jax.set_mesh`)."""

    def __init__(self, config: Config, mesh: jax.sharding.Mesh):
        self._config = config
        self._mesh = mesh
        self._optimizer = make_optimizer(config.optimizer, steps=config.steps)
        self._schedule = make_schedule(config.optimizer, steps=config.steps)
        self._graphdef = nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))[0]
        self._jitted_init = jax.jit(self._init)
        self.train_step = jax.jit(self._train_step, donate_argnums=0)
        """(state, tokens, targets) -> (state, metrics). The state given is used up: its buffers hold the new one."""
        self.eval_step = jax.jit(self._eval_step)
        """(params, tokens, targets, total) -> total + the mean loss of the batch, nats per token."""

    def init(self) -> TrainState:
        """Draws the parameters of step 0, each on the devices that will hold it."""
        return self._jitted_init(self._config.seed)

    def abstract_state(self) -> TrainState:
        """Returns the shape, type and sharding of every array of the state, and makes none of them."""
        state = self._jitted_init.eval_shape(self._config.seed)

        def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = leaf.sharding.spec if leaf.sharding else jax.P()
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(self._mesh, spec))

        return jax.tree.map(place, state)

    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """Returns the shape, type and sharding of a batch's tokens; its targets have the same."""
        shape = (self._config.data.batch_size, self._config.data.sequence_length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=jax.NamedSharding(self._mesh, token_spec(self._mesh)))

    def compile_train_step(self) -> jax.stages.Compiled:
        """Compiles `train_step` before there is anything to run it on."""
        batch = self.abstract_batch()
        return self.train_step.lower(self.abstract_state(), batch, batch).compile()

    def model(self, params: Any) -> Transformer:
        """Puts parameters back into the model."""
        return nnx.merge(self._graphdef, params)

    def _build(self, key: jax.Array) -> Transformer:
        backend = None if self._config.backend == "auto" else self._config.backend
        return Transformer(
            self._config.model,
            context_axis=CONTEXT if CONTEXT in self._mesh.shape else None,
            context_layout=self._config.mesh.context_layout,
            backend=backend,
            rngs=nnx.Rngs(params=key),
        )

    def _init(self, seed: int) -> TrainState:
        params_key, run_key = jax.random.split(jax.random.key(seed))
        params = nnx.to_pure_dict(nnx.split(self._build(params_key))[1])
        return TrainState(params, self._optimizer.init(params), jnp.int32(0), jax.random.key_data(run_key))

    def _train_step(
        self, state: TrainState, tokens: jax.Array, targets: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_fn(params: Any) -> jax.Array:
            return self.model(params).loss(tokens, targets)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):  # optax mixes ints and floats
            updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics = {
                "loss": loss.astype(jnp.float32),
                "grad_norm": optax.tree.norm(grads).astype(jnp.float32),
                "learning_rate": jnp.asarray(self._schedule(state.step), jnp.float32),
            }
        return TrainState(params, opt_state, state.step + 1, state.key), metrics

    def _eval_step(self, params: Any, tokens: jax.Array, targets: jax.Array, total: jax.Array) -> jax.Array:
        # The total goes from one batch into the next, so that they run one after the other: many programs with
        # collectives at once can starve the threads of simulated devices.
        return total + self.model(params).loss(tokens, targets).astype(jnp.float32)


def count_parameters(params: Any) -> int:
    """Returns the number of elements in all parameters, on all devices together and counted once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
