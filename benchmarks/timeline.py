"""Estimated timelines: of a matmul whose time was measured, and of a tensor-parallel MLP in several forms. No TPU.

    python benchmarks/timeline.py                        prints the table
    python benchmarks/timeline.py --write docs/check.md  also puts it between the markers in that file
    python benchmarks/timeline.py --pictures docs/img    also draws check_mlp.png and check_matmul.png

The matmul is that of the published 2x2 study on v5e (m, k, n = 16384, 16384, 8192 in bf16), which took 12.05 ms. The
MLP has batch 8, sequence 2048, width 8192 and hidden width 28672, in bf16 on v5e:2x4. Its activations are sharded over
the sequence before and after.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import HLO_ONLY, Timeline, audit, compile_for, save_picture, timeline, topology_mesh

BATCH, SEQUENCE, MODEL, HIDDEN, RING = 8, 2048, 8192, 28672, 8
BEGIN, END = "<!-- timeline table -->", "<!-- end of timeline table -->"

MEASURED_MS = {"2x2 jnp.matmul": "12.05"}  # published times on TPU v5e
WINDOWED_OFF = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "100000"}
POST_SPMD = {
    "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
    "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
}


def study() -> tuple[Callable, tuple]:
    """Returns jnp.matmul of LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] on 2x2, and its arguments."""
    mesh = topology_mesh("v5e:2x2", (2, 2), ("x", "y"))

    def array(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    fn = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None)))
    return fn, (array(16384, 16384, spec=P("x", "y")), array(16384, 8192, spec=P("x", None)))


def automatic_mlp() -> tuple[Callable, tuple]:
    """Returns the MLP as XLA partitions it, and its arguments."""
    mesh = topology_mesh("v5e:2x4", (RING,), ("model",))
    sequence = NamedSharding(mesh, P(None, "model", None))
    return jax.jit(lambda x, up, down: jax.nn.relu(x @ up) @ down, out_shardings=sequence), _arrays(mesh)


def ring_mlp(unroll: int) -> tuple[Callable, tuple]:
    """Returns the MLP as two rings of lax.ppermute, and its arguments.

    Each block is sent as two half-blocks, one in each direction. With unroll=0 every step is written out.
    """
    mesh = topology_mesh("v5e:2x4", (RING,), ("model",))
    specs = (P(None, "model", None), P(None, "model"), P("model", None))
    fn = jax.shard_map(
        functools.partial(_ring_mlp, unroll), mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
    )
    return jax.jit(fn), _arrays(mesh)


def _arrays(mesh: jax.sharding.Mesh) -> tuple:
    shapes = ((BATCH, SEQUENCE, MODEL), (MODEL, HIDDEN), (HIDDEN, MODEL))
    specs = (P(None, "model", None), P(None, "model"), P("model", None))
    return tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )


def _ring_mlp(unroll: int, x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Returns [b, s, d] for x [b, s, d]: gathers while it multiplies by `up`, and scatters the products with `down`."""
    me, half = lax.axis_index("model"), x.shape[1] // 2
    right = [(i, (i + 1) % RING) for i in range(RING)]
    left = [(i, (i - 1) % RING) for i in range(RING)]
    blocks = jnp.zeros((BATCH, RING, 2, half, up.shape[1]), x.dtype)

    def put(blocks: jax.Array, rows: jax.Array, owner: jax.Array, half_block: int) -> jax.Array:
        value = jax.nn.relu(rows @ up)[:, None, None]
        return lax.dynamic_update_slice(blocks, value, (0, owner, half_block, 0, 0))

    def gather_step(i: jax.Array, carry: tuple) -> tuple:
        ahead, back, blocks = carry
        next_ahead = lax.ppermute(ahead, "model", right)
        next_back = lax.ppermute(back, "model", left)
        blocks = put(blocks, ahead, lax.rem(me - i + RING, RING), 0)
        blocks = put(blocks, back, lax.rem(me + i, RING), 1)
        return next_ahead, next_back, blocks

    ahead, back, blocks = _loop(RING - 1, gather_step, (x[:, :half], x[:, half:], blocks), unroll)
    blocks = put(blocks, ahead, lax.rem(me + 1, RING), 0)
    blocks = put(blocks, back, lax.rem(me - 1 + RING, RING), 1)

    def product_of(owner: jax.Array, half_block: int) -> jax.Array:
        rows = lax.dynamic_slice(blocks, (0, owner, half_block, 0, 0), (BATCH, 1, 1, half, up.shape[1]))
        return jnp.dot(rows[:, 0, 0], down, preferred_element_type=jnp.float32).astype(x.dtype)

    def scatter_step(i: jax.Array, carry: tuple) -> tuple:
        ahead, back = carry
        ahead = lax.ppermute(ahead, "model", right) + product_of(lax.rem(me - 2 - i + 2 * RING, RING), 0)
        back = lax.ppermute(back, "model", left) + product_of(lax.rem(me + 2 + i, RING), 1)
        return ahead, back

    begin = product_of(lax.rem(me - 1 + RING, RING), 0), product_of(lax.rem(me + 1, RING), 1)
    return jnp.concatenate(_loop(RING - 1, scatter_step, begin, unroll), axis=1)


def _loop(steps: int, step: Callable, carry: tuple, unroll: int) -> tuple:
    if unroll:
        return lax.fori_loop(0, steps, step, carry, unroll=unroll)
    for i in range(steps):
        carry = step(jnp.int32(i), carry)
    return carry


VARIANTS: dict[str, tuple[Callable[[], tuple[Callable, tuple]], str, dict[str, str]]] = {
    "2x2 jnp.matmul": (study, "v5e:2x2", {}),
    "XLA default": (automatic_mlp, "v5e:2x4", {}),
    "XLA, windowed einsum off": (automatic_mlp, "v5e:2x4", WINDOWED_OFF),
    "XLA, post_spmd collective matmul": (automatic_mlp, "v5e:2x4", POST_SPMD),
    "ring by hand, unroll=1": (functools.partial(ring_mlp, 1), "v5e:2x4", {}),
    "ring by hand, unroll=2": (functools.partial(ring_mlp, 2), "v5e:2x4", {}),
    "ring by hand, every step written out": (functools.partial(ring_mlp, 0), "v5e:2x4", {}),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What one variant compiles to.

    Attributes:
      name: The name of the variant.
      best: The timeline.
      by_bytes: The timeline with copies timed by the bytes that they move.
      pairs: Transfers between devices. A transfer in a loop counts once.
      overlapped: How many of these have work inside.
      temporaries: Bytes on one device.
    """

    name: str
    best: Timeline
    by_bytes: Timeline
    pairs: int
    overlapped: int
    temporaries: int


def run(name: str) -> Row:
    """Compiles one variant and estimates its time."""
    make, topology, options = VARIANTS[name]
    fn, arrays = make()
    program = compile_for(topology, fn, *arrays, compiler_options={**HLO_ONLY, **options})
    pairs = [p for p in audit(program).pairs if p.communicates]
    best, by_bytes = timeline(program), timeline(program, copies="bytes")
    overlapped = sum(p.overlapped for p in pairs)
    return Row(name, best, by_bytes, len(pairs), overlapped, program.bytes_by_kind["temporaries"])


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    lines = [
        "| program | ms | ms, copies by bytes | measured ms | work | exposed "
        "| pairs with work inside | temporary MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        t = row.best
        cells = (
            row.name,
            f"{t.seconds * 1e3:.2f}",
            f"{row.by_bytes.seconds * 1e3:.2f}",
            MEASURED_MS.get(row.name, "-"),
            f"{t.compute * 1e3:.2f}",
            f"{t.exposed * 1e3:.2f}",
            f"{row.overlapped} of {row.pairs}",
            str(row.temporaries >> 20),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table; writes it and draws the pictures if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="put the table between the markers in FILE")
    parser.add_argument("--pictures", type=pathlib.Path, metavar="DIR", help="draw check_matmul.png and check_mlp.png")
    chosen = parser.parse_args()
    rows = [run(name) for name in VARIANTS]
    text = table(rows)
    print(text)
    if chosen.write:
        page = chosen.write.read_text()
        before, rest = page.split(BEGIN)
        chosen.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    if chosen.pictures:
        by_name = {row.name: row.best for row in rows}
        save_picture([rows[0].best], chosen.pictures / "check_matmul.png", titles=["2x2 jnp.matmul"])
        drawn = ["XLA, windowed einsum off", "XLA default", "ring by hand, unroll=2"]
        titles = [f"MLP, {name}" for name in drawn]
        save_picture([by_name[name] for name in drawn], chosen.pictures / "check_mlp.png", titles=titles)


if __name__ == "__main__":
    main()
