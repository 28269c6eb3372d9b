"""Published training steps, rebuilt and predicted: how far is a prediction for v6e from what was
measured?

    python benchmarks/recipes.py --programs DIR --write docs/scaling.md   all steps; each takes minutes to compile
    python benchmarks/recipes.py --programs DIR --only v6e:2x4            steps of some chips or models

The steps are those of MaxText in training/trillium of github.com/AI-Hypercomputer/tpu-recipes,
whose pages print their seconds. They are rebuilt with JAX alone: a scan over decoder layers, with
weights, moments and sequences sharded over one axis; JAX's splash attention; the embedding as a
product with one-hot rows; whole logits; AdamW after the norm of all gradients is clipped; and their
flags of libtpu, of which 0.0.52 refuses "async collective fusion" on v6e. The layer inputs and the
projections travel to the host and back.

Times and memory are predictions, with attention kernels that are played. DIR keeps what was
compiled.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, compile_once, play_program
from benchmarks.table import write_rows
from flaxasync import check
from flaxasync.check.estimate.timeline import Timeline
from train.metrics.output import gib
from train.step.flags import added, parse

FLAGS = """
    xla_tpu_scoped_vmem_limit_kib=98304 xla_tpu_use_minor_sharding_for_major_trivial_input=true
    xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 xla_tpu_assign_all_reduce_scatter_layout=true
    xla_tpu_enable_data_parallel_all_reduce_opt=true xla_tpu_data_parallel_opt_different_sized_ops=true
    xla_tpu_overlap_compute_collective_tc=true xla_enable_async_all_gather=true
    xla_tpu_enable_all_experimental_scheduler_features=true
    xla_tpu_enable_scheduler_memory_pressure_tracking=true xla_tpu_host_transfer_overlap_limit=24
    xla_tpu_aggressive_opt_barrier_removal=ENABLED xla_lhs_prioritize_async_depth_over_stall=ENABLED
    xla_tpu_enable_ag_backward_pipelining=true xla_should_allow_loop_variant_parameter_in_chain=ENABLED
    xla_should_add_loop_invariant_op_in_chain=ENABLED xla_max_concurrent_host_send_recv=100
    xla_tpu_scheduler_percent_shared_memory_limit=100 xla_latency_hiding_scheduler_rerun=2
"""  # of all recipes, by MaxText's benchmarks/xla_flags_library.py
WITHOUT_COLLECTIVE_MATMUL = "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
HEADER = (
    "model",
    "chips",
    "tokens a chip",
    "memory",
    "measured s",
    "predicted s",
    "error",
    "tokens/s a chip",
)
# what a layer may keep, beside the two of the MLP
PROJECTIONS = ("input", "query", "key", "value", "out")
ROW_MAJOR = Layout(major_to_minor=(0, 1, 2))
# weights whose outputs are no residual stream
COLUMNS = ("query", "key", "value", "gate", "up", "output")
THETA = 500_000.0  # of rotary positions
BLOCK = 2048  # rows of all blocks of the attention kernels


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published step: the model, the chips, the sequences of each chip, and the seconds that were
    measured.
    """

    name: str
    topology: str
    seconds: float
    sequences: int  # of each chip
    layers: int = 32
    width: int = 4096
    heads: int = 32
    mlp_width: int = 14_336
    vocabulary: int = 128_256
    kv_heads: int = 8
    length: int = 8192
    # positions rotate pairs of neighbouring features, as in MaxText's Llama 3.1, and not of halves
    pairs: bool = True
    dtype: str = "float32"  # of the weights and moments
    offloaded: tuple[str, ...] = PROJECTIONS  # what a layer sends to the host
    saved: tuple[str, ...] = ()  # what it keeps
    flags: str = FLAGS + WITHOUT_COLLECTIVE_MATMUL

    @property
    def chips(self) -> int:
        return check.topology_size(self.topology)

    @property
    def compiling(self) -> AbstractContextManager:
        """Sets its flags for one block of code."""
        return added(parse(self.flags))

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


_70B: dict[str, Any] = {
    "sequences": 2,
    "layers": 80,
    "width": 8192,
    "heads": 64,
    "mlp_width": 28_672,
    "offloaded": PROJECTIONS[:-1],
}
RECIPES = (
    Recipe("Llama 3.1 8B", "v6e:2x4", 3.443, 3),
    Recipe("Llama 3.1 8B", "v6e:4x4", 3.393, 3),
    Recipe("Llama 3.1 8B", "v6e:4x8", 3.495, 3),
    Recipe("Mistral 7B", "v6e:2x4", 6.320, 6, vocabulary=32_000, pairs=False),
    Recipe("Llama 3.1 70B, bfloat16", "v6e:4x8", 17.790, **_70B, dtype="bfloat16"),
    Recipe("Llama 3.1 70B", "v6e:8x8", 18.688, **_70B, flags=FLAGS),
)


def weights(recipe: Recipe) -> dict[str, Any]:
    """Returns the weights without values."""
    r = recipe
    heads = recipe.heads * recipe.head_dim
    kv = recipe.kv_heads * recipe.head_dim
    layer = {
        "query": (r.width, heads),
        "key": (r.width, kv),
        "value": (r.width, kv),
        "out": (heads, r.width),
        "gate": (r.width, r.mlp_width),
        "up": (r.width, r.mlp_width),
        "down": (r.mlp_width, r.width),
        "attention_norm": (r.width,),
        "mlp_norm": (r.width,),
    }
    ends = {
        "embed": (r.vocabulary, r.width),
        "output": (r.width, r.vocabulary),
        "final_norm": (r.width,),
    }
    stacked = {
        name: jax.ShapeDtypeStruct((r.layers, *shape), r.dtype) for name, shape in layer.items()
    }
    return {name: jax.ShapeDtypeStruct(shape, r.dtype) for name, shape in ends.items()} | {
        "layers": stacked
    }


def norm(x: Array, scale: Array) -> Array:
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def rotated(recipe: Recipe, x: Array) -> Array:
    """Applies rotary positions to x [B, L, H, A]: to pairs of neighbouring features, or of one in
    each half.
    """
    if not recipe.pairs:
        return fa.nn.rotary_embedding(x, theta=THETA)
    feature = jnp.arange(recipe.head_dim)
    position = jnp.arange(recipe.length, dtype=jnp.float32)
    angle = position[:, None, None] / THETA ** (
        (feature // 2 * 2).astype(jnp.float32) / recipe.head_dim
    )
    other = jnp.where(feature % 2 == 1, jnp.roll(x, 1, axis=-1), -jnp.roll(x, -1, axis=-1))
    x32 = x.astype(jnp.float32)
    other32 = other.astype(jnp.float32)
    return (x32 * jnp.cos(angle) + other32 * jnp.sin(angle)).astype(x.dtype)


def attention_of(recipe: Recipe) -> Callable[[Array, Array, Array], Array]:
    """Makes causal attention of q [B, H, L, A] to k and v [B, K, L, A], by JAX's splash kernels."""
    block = min(BLOCK, recipe.length)
    sizes = splash.BlockSizes(block, block, block, block, block, block, use_fused_bwd_kernel=True)
    mask = masks.MultiHeadMask([masks.CausalMask((recipe.length, recipe.length))] * recipe.heads)
    return jax.vmap(splash.make_splash_mha_single_device(mask, block_sizes=sizes))


def attend(recipe: Recipe, mesh: Mesh, q: Array, k: Array, v: Array) -> Array:
    """Computes attention of q [B, L, H, A] to k and v [B, L, K, A], each device that of its own
    sequences.
    """

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
    )
    def local(q: Array, k: Array, v: Array) -> Array:
        q = q * np.asarray(recipe.head_dim**-0.5, q.dtype)
        return jnp.moveaxis(attention_of(recipe)(*(jnp.moveaxis(x, 1, 2) for x in (q, k, v))), 2, 1)

    return local(q, k, v)


def kernel_seconds(recipe: Recipe) -> dict[str, float]:
    """Simulates the attention kernels of one sequence, and returns the seconds of all sequences of
    a chip by name.

    They are played as a program of their own, because the text of the step leaves out the tables of
    their masks.
    """
    topology = f"{recipe.topology.partition(':')[0]}:1x1"
    mesh = check.topology_mesh(topology, (1,), ("fsdp",))
    q, kv = (
        array((1, heads, recipe.length, recipe.head_dim), mesh, P())
        for heads in (recipe.heads, recipe.kv_heads)
    )

    def both(q: Array, k: Array, v: Array, do: Array) -> Any:
        return jax.vjp(attention_of(recipe), q, k, v)[1](do)

    with recipe.compiling:
        phases = play_program(topology, jax.jit(both), q, kv, kv, q)[0].slowest.phases
    names = {p.name.partition(".")[0]: p.seconds for p in phases if p.name.startswith("splash_")}
    return {name: seconds * recipe.sequences for name, seconds in names.items()}


def decoder_layer(recipe: Recipe, mesh: Mesh, x: Array, weights: dict[str, Array]) -> Array:
    w = {name: kernel.astype(x.dtype) for name, kernel in weights.items()}
    rows = NamedSharding(mesh, P("fsdp", None, None))

    def named(y: Array, name: str) -> Array:
        """Names a value [B, L, D] for the policy. Without its layout libtpu would copy whole stacks
        of all layers.
        """
        y = with_layout_constraint(lax.with_sharding_constraint(y, rows), ROW_MAJOR)
        return with_layout_constraint(checkpoint_name(y, name), ROW_MAJOR)

    x = named(x, "input")
    normed = norm(x, w["attention_norm"])
    q, k, v = (
        named(normed @ w[name], name).reshape(*x.shape[:2], -1, recipe.head_dim)
        for name in ("query", "key", "value")
    )
    q = rotated(recipe, q)
    k = rotated(recipe, k)
    x = x + named(attend(recipe, mesh, q, k, v).reshape(*x.shape[:2], -1) @ w["out"], "out")
    normed = norm(x, w["mlp_norm"])
    gate, up = (checkpoint_name(normed @ w[name], name) for name in ("gate", "up"))
    return lax.with_sharding_constraint(x + (jax.nn.silu(gate) * up) @ w["down"], rows)


def loss(
    recipe: Recipe, mesh: Mesh, params: dict[str, Any], tokens: Array, targets: Array
) -> Array:
    """Returns the mean cross-entropy of the targets [B, L], in nats per token, from whole
    logits.
    """
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=recipe.saved,
        names_which_can_be_offloaded=recipe.offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
    layer = jax.checkpoint(
        functools.partial(decoder_layer, recipe, mesh), policy=policy, prevent_cse=False
    )
    x = jax.nn.one_hot(tokens, recipe.vocabulary, dtype=jnp.bfloat16) @ params["embed"].astype(
        jnp.bfloat16
    )
    x = lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp", None, None)))
    x, _ = lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
    logits = norm(x, params["final_norm"]) @ params["output"].astype(x.dtype)
    logits = lax.with_sharding_constraint(
        logits, NamedSharding(mesh, P("fsdp", None, None))
    ).astype(jnp.float32)
    picked = jnp.sum(
        jnp.where(jnp.arange(recipe.vocabulary) == targets[..., None], logits, 0), axis=-1
    )
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def program(recipe: Recipe, mesh: Mesh) -> tuple[Any, tuple]:
    """Makes the jitted training step of a recipe, and its arguments without values: weights,
    moments and tokens.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(3e-5, b2=0.95, weight_decay=0.1)
    )

    def placed(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shards the features of the residual stream, which are the last axis of a weight, or of
        COLUMNS the first.
        """
        ahead = leaf.ndim - (2 if getattr(path[-1], "key", "") in COLUMNS else 1)
        return array(leaf.shape, mesh, P(*[None] * ahead, "fsdp") if leaf.ndim else P(), leaf.dtype)

    def step(params: Any, state: Any, tokens: Array, targets: Array) -> tuple[Any, Any, Array]:
        value, gradients = jax.value_and_grad(functools.partial(loss, recipe, mesh))(
            params, tokens, targets
        )
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = weights(recipe)
    state = jax.eval_shape(optimizer.init, params)
    tokens = array((recipe.sequences * mesh.size, recipe.length), mesh, P("fsdp"), jnp.int32)
    arguments = (*jax.tree_util.tree_map_with_path(placed, (params, state)), tokens, tokens)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments[:2])
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None)), arguments


def estimated(recipe: Recipe, folder: pathlib.Path) -> tuple[check.CompiledProgram, Timeline]:
    """Compiles a step, or reads it from the folder, and estimates its time."""
    fn, arguments = program(
        recipe, check.topology_mesh(recipe.topology, (recipe.chips,), ("fsdp",))
    )
    with recipe.compiling:
        found = compile_once(
            folder, f"{recipe.name} {recipe.topology}", recipe.topology, fn, *arguments
        )
    return found, check.timeline(found, kernels=kernel_seconds(recipe), copies="simulated")


def row(recipe: Recipe, folder: pathlib.Path) -> tuple[str, ...]:
    found, timeline = estimated(recipe, folder)
    seconds = timeline.seconds
    tokens = recipe.sequences * recipe.length
    named = (
        recipe.name,
        recipe.topology,
        f"{recipe.sequences} x {recipe.length}",
        gib(found.bytes_by_kind["total"]),
    )
    speed = f"{tokens / seconds:,.0f}"
    error = f"{seconds / recipe.seconds - 1:+.1%}"
    return (*named, f"{recipe.seconds:.3f}", f"{seconds:.3f}", error, speed)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write_rows(__doc__, "recipes", HEADER, RECIPES, row)
