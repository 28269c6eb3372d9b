"""Published training steps, rebuilt and predicted: how far is a prediction from what was measured?

    python benchmarks/recipes.py --programs DIR --write docs/scaling.md   all steps; each takes minutes to compile
    python benchmarks/recipes.py --programs DIR --only v6e:2x4            steps of some chips or models

The steps on v6e are those of MaxText in training/trillium of
github.com/AI-Hypercomputer/tpu-recipes, whose pages print their seconds. Those on v5e and v5p are
in src/maxtext/configs/tpu/{v5e,v5p} of github.com/AI-Hypercomputer/maxtext, whose pages print FLOP/s
by the count of `published_seconds`. They are rebuilt with JAX alone: a scan over decoder layers,
with weights, moments and sequences sharded over the axis "fsdp", and heads, hidden features of the
MLP, the vocabulary, and the features of activations between layers over "tensor"; JAX's splash
attention; the embedding as a product with one-hot rows; whole logits; AdamW after the norm of all
gradients is clipped; and their flags of libtpu, of which 0.0.52 refuses "async collective fusion"
on v6e. What a layer keeps or sends to the host is that of the recipe.

Times and memory are predictions, with attention kernels and matrix products that are played. DIR
keeps what was compiled.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, compile_with_products, play_program
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
_OF_V5E_AND_V5P = """
    xla_tpu_enable_data_parallel_all_reduce_opt=true xla_tpu_data_parallel_opt_different_sized_ops=true
    xla_tpu_overlap_compute_collective_tc=true xla_enable_async_all_gather=true
"""
V5E_FLAGS = f"""
    {_OF_V5E_AND_V5P} xla_tpu_enable_async_collective_fusion=true
    xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
    xla_tpu_enable_async_collective_fusion_multiple_steps=true
"""
# The pages have the fusion of gathers here as well, which today's libtpu refuses on v5p.
V5P_FLAGS = f"""
    {_OF_V5E_AND_V5P} xla_tpu_megacore_fusion_allow_ags=false xla_enable_async_collective_permute=true
    xla_tpu_enable_ag_backward_pipelining=true
"""
# The script of 32B on v5p sends the gathers to the SparseCores instead.
GATHERS_ON_SPARSE_CORES = """
    xla_sc_disable_megacore_partitioning=true xla_tpu_use_tc_device_shape_on_sc=true
    xla_tpu_enable_sparse_core_collective_offload_all_gather=true
"""
WITHOUT_COLLECTIVE_MATMUL = "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
HEADER = (
    "model",
    "chips",
    "tokens a chip",
    "memory",
    "measured s",
    "estimated s",
    "simulated s",
    "error",
)
# what a layer may keep, beside the two of the MLP
PROJECTIONS = ("input", "query", "key", "value", "out")
PRODUCTS = ("query", "key", "value", "out", "gate", "up")  # what "minimal" keeps
ROW_MAJOR = Layout(major_to_minor=(0, 1, 2))
# weights whose outputs are no residual stream
COLUMNS = ("query", "key", "value", "gate", "up", "qkv", "gate_up", "output")
THETA = 500_000.0  # of rotary positions


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
    head_dim: int = 128
    block: int = 2048  # rows of all blocks of the attention kernels
    length: int = 8192
    # positions rotate pairs of neighbouring features, as in MaxText's Llama 3.1, and not of halves
    pairs: bool = True
    dtype: str = "float32"  # of the weights and moments
    offloaded: tuple[str, ...] = PROJECTIONS  # what a layer sends to the host
    saved: tuple[str, ...] = ()  # what it keeps
    flags: str = FLAGS + WITHOUT_COLLECTIVE_MATMUL
    tensor: int = 1  # chips that share heads, hidden features and the vocabulary
    fused: bool = False  # one product for q, k and v, and one for gate and up

    @property
    def chips(self) -> int:
        return check.topology_size(self.topology)

    @property
    def compiling(self) -> AbstractContextManager:
        """Sets its flags for one block of code."""
        return added(parse(self.flags))

    def mesh(self) -> Mesh:
        """Returns the mesh in JAX's order of devices, as MaxText has it. In the order of
        `fa.make_mesh`, XLA's gathers over several dimensions of a torus take one ring of two links.
        """
        sizes: tuple[int, ...] = (self.chips,)
        names: tuple[str, ...] = ("fsdp",)
        if self.tensor > 1:
            sizes = (self.chips // self.tensor, self.tensor)
            names = ("fsdp", "tensor")
        devices = check.topology_devices(self.topology)
        return Mesh(mesh_utils.create_device_mesh(sizes, devices=devices), names)

    @property
    def axis(self) -> str | None:
        """The axis of the mesh that splits heads, hidden features and the vocabulary."""
        return "tensor" if self.tensor > 1 else None


def published_seconds(recipe: Recipe, teraflops: float) -> float:
    """Returns the seconds of a step whose page prints only the TFLOP/s of a chip.

    MaxText counts 6 FLOPs for each parameter of a product and each token, and the whole of
    attention.
    """
    r = recipe
    heads = 2 * (r.heads + r.kv_heads) * r.head_dim
    parameters = r.layers * r.width * (heads + 3 * r.mlp_width) + r.vocabulary * r.width
    attention = 12 * r.layers * r.heads * r.head_dim * r.length
    flops = r.sequences * r.length * (6 * parameters + attention)
    return flops / (teraflops * 1e12)


def published(
    name: str,
    topology: str,
    tensor: int,
    sequences: int,
    teraflops: float | None = None,
    seconds: float = 0.0,
    **changed: Any,
) -> Recipe:
    """Returns a step of MaxText's pages for v5e and v5p, with what it changes of SIZES[name]. A
    page prints the TFLOP/s of a chip, or what the seconds follow from.
    """
    flags = V5E_FLAGS if topology.startswith("v5e") else V5P_FLAGS
    common: dict[str, Any] = {
        "vocabulary": 32_000,
        "length": 2048,
        "pairs": False,
        "offloaded": (),
        "block": 512,
        "flags": flags,
        "kv_heads": SIZES[name]["heads"],
    }
    model = common | SIZES[name] | changed
    recipe = Recipe(name, topology, seconds, sequences, tensor=tensor, **model)
    if teraflops is None:
        return recipe
    return dataclasses.replace(recipe, seconds=published_seconds(recipe, teraflops))


SIZES: dict[str, dict[str, int]] = {
    "16B": {"layers": 32, "width": 4096, "heads": 64, "mlp_width": 28_672},
    "32B": {"layers": 32, "width": 8192, "heads": 64, "mlp_width": 28_672},
    "64B": {"layers": 64, "width": 8192, "heads": 64, "mlp_width": 28_672},
    "128B": {"layers": 64, "width": 8192, "heads": 128, "mlp_width": 57_344},
    "256B": {"layers": 64, "width": 16_384, "heads": 128, "mlp_width": 57_344},
    "Llama 2 70B": {"layers": 80, "width": 8192, "heads": 64, "mlp_width": 28_672, "kv_heads": 8},
}
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
    published("16B", "v5e:16x16", 1, 6, 120),
    published("32B", "v5e:16x16", 1, 4, 132),
    published("64B", "v5e:16x16", 1, 2, 118),
    published("128B", "v5e:16x16", 16, 1, 110, offloaded=PROJECTIONS[1:4], fused=True),
    published(
        "32B",
        "v5p:4x4x4",
        4,
        6,
        328,
        saved=PRODUCTS,
        flags=V5P_FLAGS + GATHERS_ON_SPARSE_CORES,
    ),
    published("64B", "v5p:4x4x4", 4, 3, 323, saved=PRODUCTS),
    published("128B", "v5p:4x4x8", 8, 1, 315, saved=PRODUCTS),
    published("256B", "v5p:8x8x8", 8, 1, 308, saved=PRODUCTS),
    published(
        "Llama 2 70B",
        "v5p:8x8x8",
        1,
        2,
        seconds=2 * 4096 / 692,  # tokens, and tokens/s
        length=4096,
        saved=PROJECTIONS[1:],
    ),
)


def weights(recipe: Recipe) -> dict[str, Any]:
    """Returns the weights without values."""
    r = recipe
    heads = recipe.heads * recipe.head_dim
    kv = recipe.kv_heads * recipe.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "out": (heads, r.width),
        "down": (r.mlp_width, r.width),
        "attention_norm": (r.width,),
        "mlp_norm": (r.width,),
    }
    if recipe.fused:
        layer |= {"qkv": (r.width, 3, heads), "gate_up": (r.width, 2, r.mlp_width)}
    else:
        layer |= {"query": (r.width, heads), "key": (r.width, kv), "value": (r.width, kv)}
        layer |= {"gate": (r.width, r.mlp_width), "up": (r.width, r.mlp_width)}
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
    """Makes causal attention of the q [B, H, L, A] of a device to k and v [B, K, L, A], by JAX's
    splash kernels.
    """
    block = min(recipe.block, recipe.length)
    sizes = splash.BlockSizes(block, block, block, block, block, block, use_fused_bwd_kernel=True)
    heads = recipe.heads // recipe.tensor
    mask = masks.MultiHeadMask([masks.CausalMask((recipe.length, recipe.length))] * heads)
    return jax.vmap(splash.make_splash_mha_single_device(mask, block_sizes=sizes))


def attend(recipe: Recipe, mesh: Mesh, q: Array, k: Array, v: Array) -> Array:
    """Computes attention of q [B, L, H, A] to k and v [B, L, K, A], each device that of its own
    sequences and heads.
    """
    spec = P("fsdp", None, recipe.axis)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
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
        array((1, heads // recipe.tensor, recipe.length, recipe.head_dim), mesh, P())
        for heads in (recipe.heads, recipe.kv_heads)
    )

    def both(q: Array, k: Array, v: Array, do: Array) -> Any:
        return jax.vjp(attention_of(recipe), q, k, v)[1](do)

    with recipe.compiling:
        phases = play_program(topology, jax.jit(both), q, kv, kv, q)[0].slowest.phases
    names = {p.name.partition(".")[0]: p.seconds for p in phases if p.name.startswith("splash_")}
    # The batch is split over fsdp alone, so chips that share heads have the same sequences.
    count = recipe.sequences * recipe.tensor
    return {name: seconds * count for name, seconds in names.items()}


def products_of(
    x: Array, weights: dict[str, Array], fused: str, parts: tuple[str, ...]
) -> list[Array]:
    """Returns the products of x [B, L, D] with each of some weights, which may be stored as one."""
    if fused not in weights:
        return [x @ weights[name] for name in parts]
    together = jnp.einsum("bld,dnf->blnf", x, weights[fused])
    return [together[:, :, n] for n in range(len(parts))]


def decoder_layer(recipe: Recipe, mesh: Mesh, x: Array, weights: dict[str, Array]) -> Array:
    w = {name: kernel.astype(x.dtype) for name, kernel in weights.items()}
    rows = NamedSharding(mesh, P("fsdp", None, recipe.axis))

    def named(y: Array, name: str) -> Array:
        """Names a value [B, L, D] for the policy. Without its layout libtpu would copy whole stacks
        of all layers.
        """
        y = with_layout_constraint(lax.with_sharding_constraint(y, rows), ROW_MAJOR)
        return with_layout_constraint(checkpoint_name(y, name), ROW_MAJOR)

    x = named(x, "input")
    normed = norm(x, w["attention_norm"])
    parts: tuple[str, ...] = ("query", "key", "value")
    products = products_of(normed, w, "qkv", parts)
    q, k, v = (
        named(product, name).reshape(*x.shape[:2], -1, recipe.head_dim)
        for name, product in zip(parts, products, strict=True)
    )
    q = rotated(recipe, q)
    k = rotated(recipe, k)
    x = x + named(attend(recipe, mesh, q, k, v).reshape(*x.shape[:2], -1) @ w["out"], "out")
    normed = norm(x, w["mlp_norm"])
    parts = ("gate", "up")
    products = products_of(normed, w, "gate_up", parts)
    gate, up = (
        checkpoint_name(product, name) for name, product in zip(parts, products, strict=True)
    )
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
    features = NamedSharding(mesh, P("fsdp", None, recipe.axis))
    x = lax.with_sharding_constraint(x, features)
    x, _ = lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
    logits = norm(x, params["final_norm"]) @ params["output"].astype(x.dtype)
    logits = lax.with_sharding_constraint(logits, features).astype(jnp.float32)
    picked = jnp.sum(
        jnp.where(jnp.arange(recipe.vocabulary) == targets[..., None], logits, 0), axis=-1
    )
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-5, b2=0.95, weight_decay=0.1))


def program(recipe: Recipe, mesh: Mesh) -> tuple[Any, tuple]:
    """Makes the jitted training step of a recipe, and its arguments without values: weights,
    moments and tokens.
    """

    def placed(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shards the features of the residual stream over "fsdp": the last axis of a weight, or of
        COLUMNS the first, which heads, hidden features and the vocabulary follow.
        """
        name = getattr(path[-1], "key", "")
        stacks = 1 if any(getattr(key, "key", "") == "layers" for key in path) else 0
        axes: list[str | None] = [None] * leaf.ndim
        if name in COLUMNS:
            axes[stacks] = "fsdp"
            axes[-1] = recipe.axis
        elif leaf.ndim:
            axes[-1] = "fsdp"
            if leaf.ndim > stacks + 1:
                axes[stacks] = recipe.axis
        return array(leaf.shape, mesh, P(*axes), leaf.dtype)

    def step(params: Any, state: Any, tokens: Array, targets: Array) -> tuple[Any, Any, Array]:
        value, gradients = jax.value_and_grad(functools.partial(loss, recipe, mesh))(
            params, tokens, targets
        )
        updates, state = optimizer().update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = weights(recipe)
    state = jax.eval_shape(optimizer().init, params)
    tokens = array((recipe.sequences * recipe.chips, recipe.length), mesh, P("fsdp"), jnp.int32)
    arguments = (*jax.tree_util.tree_map_with_path(placed, (params, state)), tokens, tokens)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments[:2])
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None)), arguments


class Prediction(NamedTuple):
    """A step that was compiled, and what it is estimated to take."""

    program: check.CompiledProgram
    # The attention kernels are simulated in both. Products take the compiler's estimates,
    without_products: Timeline
    simulated: Timeline  # or are simulated, too.


def predicted(recipe: Recipe, folder: pathlib.Path) -> Prediction:
    """Compiles a step, or reads it from the folder, and estimates its time."""
    fn, arguments = program(recipe, recipe.mesh())
    with recipe.compiling:
        found, products = compile_with_products(
            folder, f"{recipe.name} {recipe.topology}", recipe.topology, fn, *arguments
        )
    kernels = kernel_seconds(recipe)
    return Prediction(
        found,
        check.timeline(found, kernels=kernels, copies="simulated"),
        check.timeline(found, kernels=kernels, products=products, copies="simulated"),
    )


def row(recipe: Recipe, folder: pathlib.Path) -> tuple[str, ...]:
    found = predicted(recipe, folder)
    seconds = found.simulated.seconds
    return (
        recipe.name,
        recipe.topology,
        f"{recipe.sequences} x {recipe.length}",
        gib(found.program.bytes_by_kind["total"]),
        f"{recipe.seconds:.3f}",
        f"{found.without_products.seconds:.3f}",
        f"{seconds:.3f}",
        f"{seconds / recipe.seconds - 1:+.1%}",
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write_rows(__doc__, "recipes", HEADER, RECIPES, row)
