"""The attention kernels of flaxasync, JAX and tokamax, forward and backward: simulated without a
TPU.

    python benchmarks/attention_kernel.py [--write docs/kernels/layers.md]      about ten minutes

The program computes causal attention of one sequence of 4096 rows, with four heads of 128 features
that share one head of keys and values, in bfloat16, and its gradients. That is what one of eight
tensor-parallel devices has of a sequence of the 8B preset. `fa.attention` takes its own tiles. The
two others, which are called splash attention, are tried with all of TILES and OPTIONS, and the
fastest of them is in the table, for each of the three times by itself.

"Forward" and "backward" are the Pallas kernels, and "program" is everything. The share of the peak
counts the causal half of two products forward, and of five backward. Tiles with which a program
does not compile are named, and left out.

It needs libtpu, and tokamax 0.0.17 for its rows: pip install '.[bench]'.
"""

import dataclasses
import importlib.util
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as jax_splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_masks
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, play_program, with_gradients
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check.player.transfers import UNKNOWN_SCALARS
from flaxasync.hardware import chip

CHIPS = ("v5e", "v6e", "v5p")
HEADS = 4
ROWS = 4096
FEATURES = 128
TILES = (  # of queries, of keys, and of the keys that are multiplied at once
    (512, 512, 512),
    (1024, 1024, 512),
    (1024, 1024, 1024),
    (1024, 2048, 512),
    (2048, 1024, 512),
    (2048, 2048, 512),
)
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "JAX": ({"use_fused_bwd_kernel": False}, {"use_fused_bwd_kernel": True}),
    "tokamax": (
        {},
        {"qk_diag_skip": True, "sv_diag_skip": True},
        {"use_experimental_scheduler": True},
    ),
}
FORWARD = re.compile(r"flash_attention(?!_backward)|splash_.*fwd")
BACKWARD = re.compile(r"flash_attention_backward|splash_.*d(kv|q)")


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of the kernels forward, of those backward, and of the whole program."""

    forward: float
    backward: float
    program: float


def ours(q: Array, k: Array, v: Array) -> Array:
    """Computes attention of q [h, s, d] to k and v [s, d] by `fa.attention`."""
    return fa.attention(jnp.moveaxis(q, 0, 1)[None], k[None, :, None], v[None, :, None])[
        0
    ].swapaxes(0, 1)


def of_jax(tiles: tuple[int, int, int], **options: Any) -> Callable[[Array, Array, Array], Array]:
    """Makes the same function by JAX's splash attention; see TILES and OPTIONS."""
    q, kv, compute = tiles
    unfused: dict[str, Any] = (
        {} if options["use_fused_bwd_kernel"] else {"block_q_dq": q, "block_kv_dq": kv}
    )
    sizes = jax_splash.BlockSizes(q, kv, compute, q, kv, compute, **unfused, **options)
    masks = jax_masks.MultiHeadMask([jax_masks.CausalMask((ROWS, ROWS))] * HEADS)
    kernel = jax_splash.make_splash_mqa_single_device(masks, block_sizes=sizes)
    return lambda q, k, v: kernel(q * np.asarray(FEATURES**-0.5, q.dtype), k, v)


def of_tokamax(
    tiles: tuple[int, int, int], **options: Any
) -> Callable[[Array, Array, Array], Array]:
    """Makes the same function by tokamax's splash attention; see TILES and OPTIONS."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    q, kv, compute = tiles
    config = splash.SplashConfig(q, kv, compute, q, kv, compute, **options)
    kernel = splash.make_splash_mqa_single_device(masks.CausalMask((ROWS, ROWS)), config=config)
    return lambda q, k, v: kernel(q * np.asarray(FEATURES**-0.5, q.dtype), k, v)


LIBRARIES = {"JAX": of_jax, "tokamax": of_tokamax}


def simulated(attention: Callable[[Array, Array, Array], Array], name: str) -> Times:
    topology = f"{name}:1x1" if name != "v5p" else "v5p:1x1x1"
    mesh = fa.check.topology_mesh(topology, (1,), ("x",), axis_types=(AxisType.Auto,))
    heads = array((HEADS, ROWS, FEATURES), mesh, P())
    one = array((ROWS, FEATURES), mesh, P())
    with jax.set_mesh(mesh):
        both = jax.jit(with_gradients(attention))
        played, _ = play_program(topology, both, heads, one, one, heads)
    phases = played.slowest.phases
    forward, backward = (
        sum(p.seconds for p in phases if kernel.match(p.name)) for kernel in (FORWARD, BACKWARD)
    )
    if not (forward and backward) or any(UNKNOWN_SCALARS in note for note in played.notes):
        raise AssertionError(
            f"what was simulated is not attention: {[phase.name for phase in phases]}, "
            f"{played.notes}"
        )
    return Times(forward, backward, played.seconds)


def best_of(library: str, name: str) -> Times:
    """Simulates the attention of another library with all tiles and options; returns the shortest
    of each time.
    """
    found = []
    for tiles, options in itertools.product(TILES, OPTIONS[library]):
        try:
            found.append(simulated(LIBRARIES[library](tiles, **options), name))
        except (RuntimeError, ValueError) as error:
            print(
                name,
                library,
                tiles,
                options,
                "does not compile:",
                str(error).splitlines()[0][:120],
                flush=True,
            )
            continue
        print(
            name,
            library,
            tiles,
            options,
            *(f"{x * 1e3:.3f}" for x in dataclasses.astuple(found[-1])),
            flush=True,
        )
    return Times(*map(min, zip(*map(dataclasses.astuple, found), strict=True)))


def row(name: str, library: str, times: Times) -> tuple[str, ...]:
    product = 2 * HEADS * ROWS**2 * FEATURES / 2 / chip(name).flops
    cells = [
        f"{seconds * 1e3:.3f} ({products * product / seconds:.0%})"
        for seconds, products in ((times.forward, 2), (times.backward, 5))
    ]
    return name, library, *cells, f"{times.program * 1e3:.3f}"


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    libraries = [
        library for library in LIBRARIES if library == "JAX" or importlib.util.find_spec(library)
    ]
    rows = []
    for name in CHIPS:
        rows.append(row(name, "flaxasync", simulated(ours, name)))
        rows += [row(name, library, best_of(library, name)) for library in libraries]
    table = print_table(("chip", "kernel", "forward ms", "backward ms", "program ms"), rows)
    write_between_markers(chosen.write, "attention kernel", table)


if __name__ == "__main__":
    main()
