"""One training step, one validation step, and the state that they work on.

With `optimizer.master_copies` the state holds float32 parameters, and the model computes with
copies of them in `model.param_dtype`, which exist within a step only.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PyTree

from flaxasync.mesh import check_tpu, mesh_report
from models.transformer import Losses, Transformer
from train.config import Config
from train.lifecycle.errors import InputError, as_input_errors
from train.step.mesh import CONTEXT, FSDP, token_spec
from train.step.microbatches import Parts, loss_and_gradient, sum_of_losses
from train.step.optimizer import GuardState, init_guard, is_on, judge, make_optimizer, make_schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All arrays of a run; a checkpoint stores them."""

    params: PyTree  # of the model, as nested dicts whose keys are the names of its attributes
    opt_state: (
        optax.OptState
    )  # of the optax optimizer, whose moments are sharded as the parameters are
    step: jax.Array  # number of steps that are done, an int32 scalar
    guard: GuardState | None = None  # of what skips updates, if any may be skipped


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
        """(state, *batch) -> (state, metrics). The given state is donated: its buffers hold the new
        state.
        """
        self.eval_step = jax.jit(self._eval_step)
        """(params, total, *batch) -> total + (sum of the losses of the batch in nats, number of its
        targets).
        """

    def init(self) -> TrainState:
        """Makes the state of step 0; every parameter is drawn on the devices that hold it."""
        return self._jitted_init(self._config.seed)

    def start_from(self, params: PyTree) -> TrainState:
        """Makes the state of step 0 that has the given parameters."""
        with jax.numpy_dtype_promotion("standard"):
            return self._jitted_init(self._config.seed, params)

    def complete(self, state: TrainState) -> TrainState:
        """Adds the parts of the state that a checkpoint lacks, because this run keeps them and that
        one did not.
        """
        if not is_on(self._config.skip) or state.guard is not None:
            return state
        return dataclasses.replace(state, guard=jax.jit(init_guard)())

    def abstract_state(self) -> TrainState:
        """Returns the shape, type and sharding of every array of the state without making any."""
        state = self._jitted_init.eval_shape(self._config.seed)

        def with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = jax.P()
            if leaf.sharding:
                spec = leaf.sharding.spec
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=jax.NamedSharding(self._mesh, spec)
            )

        return jax.tree.map(with_sharding, state)

    def abstract_batch(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shape, type and sharding of each array of a batch."""
        shape = (self._config.data.batch_size, self._config.data.sequence_length)
        tokens = jax.ShapeDtypeStruct(
            shape, jnp.int32, sharding=jax.NamedSharding(self._mesh, token_spec(self._mesh))
        )
        if self._config.data.separator is None:
            return tokens, tokens
        return tokens, tokens, tokens

    def compile_train_step(self) -> jax.stages.Compiled:
        """Compiles `train_step` from abstract values."""
        return self.train_step.lower(self.abstract_state(), *self.abstract_batch()).compile()

    def compile_eval_step(self) -> jax.stages.Compiled:
        """Compiles `eval_step`, so that no report of the speed includes it."""
        total = jax.ShapeDtypeStruct(
            (2,), jnp.float32, sharding=jax.NamedSharding(self._mesh, jax.P())
        )
        params = self.abstract_state().params
        return self.eval_step.lower(params, total, *self.abstract_batch()).compile()

    def model(self, params: PyTree) -> Transformer:
        """Returns the model with the given parameters, which are cast to its parameter type if they
        have another.
        """
        return nnx.merge(self._graphdef, optax.tree.cast(params, self._config.model.param_dtype))

    def _build(self, key: jax.Array) -> Transformer:
        return Transformer(
            self._config.model,
            fsdp_axis=FSDP if FSDP in self._mesh.shape else None,
            context_axis=CONTEXT if CONTEXT in self._mesh.shape else None,
            context_layout=self._config.mesh.context_layout,
            backend=None if self._config.backend == "auto" else self._config.backend,
            rngs=nnx.Rngs(params=key),
        )

    def _init(self, seed: int, params: PyTree = None) -> TrainState:
        optimizer = self._config.optimizer
        if params is None:
            key, _ = jax.random.split(jax.random.key(seed))
            params = nnx.to_pure_dict(nnx.split(self._build(key))[1])
        kind = self._config.model.param_dtype
        if optimizer.master_copies:
            kind = "float32"
        # those of another run may have another type
        params = optax.tree.cast(params, kind)
        guard = None
        if is_on(self._config.skip):
            guard = init_guard()
        return TrainState(params, self._optimizer.init(params), jnp.int32(0), guard)

    def _loss(self, params: PyTree, *batch: jax.Array) -> tuple[jax.Array, Parts]:
        """Returns what training minimizes and, with experts, the metrics that are its parts."""
        model = self.model(params)
        losses = self._losses(model, *batch, routed=True)
        if losses.load_balance is None or losses.router_z is None:
            return losses.cross_entropy, {}
        parts = {
            "loss": losses.cross_entropy,
            "load_balance": losses.load_balance,
            "router_z": losses.router_z,
        }
        return model.total(losses), parts

    def _cross_entropy(self, params: PyTree, *batch: jax.Array) -> jax.Array:
        return self._losses(self.model(params), *batch, routed=False).cross_entropy

    def _losses(
        self,
        model: Transformer,
        tokens: jax.Array,
        targets: jax.Array,
        *segments: jax.Array,
        routed: bool,
    ) -> Losses:
        if not segments:
            return model.losses(tokens, targets, routed=routed)
        weights = self._has_target(tokens).astype(jnp.float32)
        return model.losses(
            tokens, targets, segment_ids_BL=segments[0], weights_BL=weights, routed=routed
        )

    def _targets(self, tokens: jax.Array, *_: jax.Array) -> jax.Array:
        if self._config.data.separator is None:
            return jnp.float32(tokens.size)
        return jnp.sum(self._has_target(tokens), dtype=jnp.float32)

    def _has_target(self, tokens: jax.Array) -> jax.Array:
        """Returns which positions are not separators: nothing predicts the first token of the next
        document.
        """
        assert self._config.data.separator is not None
        return tokens != jnp.int32(self._config.data.separator)

    def _train_step(
        self, state: TrainState, *batch: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_overlap(self._config, self._mesh)
        params = optax.tree.cast(state.params, self._config.model.param_dtype)
        loss, parts, grads = loss_and_gradient(
            self._loss, self._targets, params, batch, self._config.data.microbatches
        )
        # optax mixes integers and floats
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
            grads = optax.tree.cast_like(grads, state.params)
            norm = optax.tree.norm(grads)
            updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics = {"loss": loss, "grad_norm": norm.astype(jnp.float32)} | parts
            updates_done = state.step
            guard = state.guard
            if guard is not None:
                updates_done = state.step - guard.skipped
                skip, guard = judge(guard, loss, norm, self._config.skip)
                params, opt_state = optax.tree.where(
                    skip, (state.params, state.opt_state), (params, opt_state)
                )
                metrics["skipped"] = skip
            metrics["learning_rate"] = jnp.asarray(self._schedule(updates_done), jnp.float32)
        return TrainState(params, opt_state, state.step + 1, guard), metrics

    def _eval_step(self, params: PyTree, total: jax.Array, *batch: jax.Array) -> jax.Array:
        # Each batch takes the total of the batch before it, so that the batches run one after the
        # other. Many programs with collectives that run at once can exhaust the thread pool of
        # simulated devices.
        return total + sum_of_losses(
            self._cross_entropy, self._targets, params, batch, self._config.data.microbatches
        )


@contextlib.contextmanager
def backend_limits_are_input_errors(config: Config) -> Iterator[None]:
    """Turns the NotImplementedError of a layer, whose backend cannot serve this run, into an
    InputError.
    """
    try:
        yield
    except NotImplementedError as error:
        raise InputError(f"backend={config.backend} cannot serve this run: {error}") from error


def _check_overlap(config: Config, mesh: jax.sharding.Mesh) -> None:
    if config.model.fsdp_overlap != "prefetch_pallas":
        return
    other = "--model.fsdp_overlap prefetch"
    with as_input_errors(NotImplementedError):
        check_tpu("model.fsdp_overlap=prefetch_pallas", f"{other}, which runs on every device")
    if any(axis.name == FSDP and axis.across_slices for axis in mesh_report(mesh)):
        raise InputError(
            "model.fsdp_overlap=prefetch_pallas sends along links, and mesh.fsdp goes across "
            f"slices, which none connects; put mesh.data across them, or use {other}"
        )
