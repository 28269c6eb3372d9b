"""One training step, one validation step, and the state that they work on.

The state is a plain pytree of sharded arrays: the parameters that `nnx.split` returns, the optimizer's moments, the
step and the random key. The parameters keep the names of the model's attributes, in checkpoints as well.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.transformer import Transformer
from train.config import Config, InputError
from train.mesh import CONTEXT, token_spec
from train.optimizer import make_optimizer, make_schedule


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "step", "key"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All arrays of a run; a checkpoint stores them.

    Attributes:
      params: Parameters of the model, as nested dicts.
      opt_state: State of the optax optimizer, whose moments are sharded as the parameters are.
      step: Number of updates that are done, an int32 scalar.
      key: Random key of the run, uint32 [2]; whatever is drawn at a step folds the step into it.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


class Trainer:
    """The compiled functions of a run. They must be called under `jax.set_mesh(mesh)`."""

    def __init__(self, config: Config, mesh: jax.sharding.Mesh):
        self._config = config
        self._mesh = mesh
        self._optimizer = make_optimizer(config.optimizer, steps=config.steps)
        self._schedule = make_schedule(config.optimizer, steps=config.steps)
        self._graphdef = nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))[0]
        self._jitted_init = jax.jit(self._init)
        self.train_step = jax.jit(self._train_step, donate_argnums=0)
        """(state, tokens, targets) -> (state, metrics). The given state is donated: its buffers hold the new state."""
        self.eval_step = jax.jit(self._eval_step)
        """(params, tokens, targets, total) -> total + mean loss of the batch, in nats per token."""

    def init(self) -> TrainState:
        """Makes the state of step 0; every parameter is drawn on the devices that hold it."""
        return self._jitted_init(self._config.seed)

    def abstract_state(self) -> TrainState:
        """Returns the shape, type and sharding of every array of the state without making any."""
        state = self._jitted_init.eval_shape(self._config.seed)

        def with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = leaf.sharding.spec if leaf.sharding else jax.P()
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(self._mesh, spec))

        return jax.tree.map(with_sharding, state)

    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """Returns the shape, type and sharding of the tokens of a batch, which are those of its targets, too."""
        shape = (self._config.data.batch_size, self._config.data.sequence_length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=jax.NamedSharding(self._mesh, token_spec(self._mesh)))

    def compile_train_step(self) -> jax.stages.Compiled:
        """Compiles `train_step` ahead of time, from abstract values."""
        batch = self.abstract_batch()
        return self.train_step.lower(self.abstract_state(), batch, batch).compile()

    def model(self, params: Any) -> Transformer:
        """Returns the model with the given parameters."""
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
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics = {
                "loss": loss.astype(jnp.float32),
                "grad_norm": optax.tree.norm(grads).astype(jnp.float32),
                "learning_rate": jnp.asarray(self._schedule(state.step), jnp.float32),
            }
        return TrainState(params, opt_state, state.step + 1, state.key), metrics

    def _eval_step(self, params: Any, tokens: jax.Array, targets: jax.Array, total: jax.Array) -> jax.Array:
        # Each batch takes the total of the batch before it, so that the batches run one after the other. Many programs
        # with collectives that run at once can exhaust the thread pool of simulated devices.
        return total + self.model(params).loss(tokens, targets).astype(jnp.float32)


@contextlib.contextmanager
def backend_limits_are_input_errors(config: Config) -> Iterator[None]:
    """Turns the NotImplementedError of a layer, whose backend cannot serve this run, into an InputError."""
    try:
        yield
    except NotImplementedError as error:
        raise InputError(f"backend={config.backend} cannot serve this run: {error}") from error


def count_parameters(params: Any) -> int:
    """Returns the number of elements in all parameters, each counted once however many devices hold it."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
