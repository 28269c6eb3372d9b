"""Four layers of a 4B decoder on data 2 x model 4, forward and with all gradients: estimated
without a TPU.

    python benchmarks/data_axis.py [--write docs/scaling.md] [--topologies v5e:2x4 v6e:2x4]

Layers of width 2560 with 32 heads of 128, 8 key-value heads and an MLP of 9728, on 8 sequences of
2048 tokens, all in bfloat16. No product or attention is computed twice. "plain NNX" is the layer of
benchmarks/plain_transformer.py under `nnx.scan`, "flaxasync" that of models/layer.py, and "summed
beside" the same under `fa.nn.scan_with_prefetch`, whose permutes sum gradients over the data axis,
and which keeps what `fa.save_costly` names. "Kept" is `gathered_mib=128`. All of them use the
attention kernel of `fa.attention`, and are compiled with the flag of the public recipes, or with
that of `--flag NAME=VALUE`, or with none (`--flag ""`). "Of plain" is the time of plain NNX divided
by that of the row.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.plain_transformer import Layout, PlainLayer
from benchmarks.programs import COMPILE_SECONDS, array, split_layer, with_gradients
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync import check
from models.config import TransformerConfig
from models.layer import DecoderLayer

TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
PLAIN = "plain NNX"
OURS = "flaxasync"
BESIDE = "flaxasync, summed beside"
KEPT = f"{BESIDE}, gathered x kept"
VARIANTS = (PLAIN, OURS, BESIDE, KEPT)
LAYERS = 4
BATCH = 8
SEQUENCE = 2048
CONFIG = TransformerConfig(
    width=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_width=9728,
    dtype="bfloat16",
    param_dtype="bfloat16",
)
FLAG = "xla_tpu_scoped_vmem_limit_kib=98304"
HEADER = ("topology", "program", "ms a layer", "exposed ms a layer", "of plain")


def make_layer(variant: str, rngs: nnx.Rngs) -> nnx.Module:
    if variant == PLAIN:
        return PlainLayer(CONFIG, layout=Layout(flash=True), rngs=rngs)
    config = dataclasses.replace(CONFIG, gathered_mib=128 if variant == KEPT else 0)
    return DecoderLayer(config, rngs=rngs)


def program(variant: str, mesh: Mesh) -> tuple[Any, tuple]:
    """Returns the jitted forward and backward pass of all layers, and its arguments without values.

    It must be called under `jax.set_mesh(mesh)`. The function returns y, the gradients of the
    parameters, and dx.
    """
    unnamed = {nnx.PARTITION_NAME: None}

    def stack() -> nnx.Module:
        make = nnx.vmap(
            lambda rngs: make_layer(variant, rngs),
            in_axes=0,
            out_axes=0,
            transform_metadata=unnamed,
        )
        return nnx.split_rngs(splits=LAYERS)(make)(nnx.Rngs(0))

    graph, state = split_layer(stack, mesh)
    x = array((BATCH, SEQUENCE, CONFIG.width), mesh, P("data", "model", None))

    def apply(state: Any, x: jax.Array) -> jax.Array:
        if variant in (BESIDE, KEPT):
            return fa.nn.scan_with_prefetch(
                lambda layer, x: layer(x),
                nnx.merge(graph, state),
                x,
                fsdp_axis=None,
                dtype=jnp.bfloat16,
                policy=fa.save_costly,
            )
        scan = nnx.scan(
            lambda layer, x: layer(x),
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata=unnamed,
        )
        return scan(nnx.merge(graph, state), x)

    shardings = (x.sharding, jax.tree.map(lambda value: value.sharding, state), x.sharding)
    return jax.jit(with_gradients(apply), out_shardings=shardings), (state, x, x)


def estimate(variant: str, topology: str, flag: str) -> check.Timeline:
    kind = AxisType.Auto if variant == PLAIN else AxisType.Explicit
    shape = (2, check.topology_size(topology) // 2)
    mesh = check.topology_mesh(topology, shape, ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        fn, arguments = program(variant, mesh)
        options = dict(check.HLO_ONLY) | dict([flag.split("=")] if flag else [])
        compiled = check.compile_for(
            topology, fn, *arguments, compiler_options=options, timeout=COMPILE_SECONDS
        )
    return check.timeline(compiled, kernels="play")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--topologies", nargs="+", default=list(TOPOLOGIES), metavar="NAME", help="as v5e:2x4"
    )
    parser.add_argument(
        "--flag", default=FLAG, metavar="NAME=VALUE", help="for libtpu; %(default)s by default"
    )
    chosen = parser.parse_args()
    rows = []
    for topology in chosen.topologies:
        found = {variant: estimate(variant, topology, chosen.flag) for variant in VARIANTS}
        for variant, timeline in found.items():
            each, exposed = (
                f"{seconds / LAYERS * 1e3:.2f}" for seconds in (timeline.seconds, timeline.exposed)
            )
            rows.append(
                (topology, variant, each, exposed, f"{found[PLAIN].seconds / timeline.seconds:.2f}")
            )
            print(*rows[-1], flush=True)
    write_between_markers(chosen.write, "data axis", print_table(HEADER, rows))


if __name__ == "__main__":
    main()
