"""Compares ring attention with gathered attention and with tokamax's ring, compiled without a TPU.

    python benchmarks/attention.py [--write docs/ring.md] [--tables transfers comparison]

It makes two tables. *transfers* has every transfer of the compiled program, and what is inside it,
for causal attention of 32 heads of 128 and 8 key-value heads, in the zigzag layout, forward and
backward, in bfloat16. *comparison* has full attention of 8 heads and 2 key-value heads on v5e:2x4,
beside that of tokamax, whose ring takes the mask as an array and so cannot take a causal mask of
such lengths. Bytes and pairs are facts of the program. Times are estimates:
`flaxasync.check.timeline` of the whole program, with every attention kernel at the share of the
peak that it reaches when its bundles are played on one v5e (8192 rows, two heads).

It needs libtpu, and tokamax 0.0.17 for the second table: pip install '.[bench]'.
"""

import functools
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, with_gradients
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.hardware import chip
from flaxasync.kernels.attention_block import BlockOperands, Mask, Product, Scores
from flaxasync.kernels.flash_attention import Flash

R = 8
HEAD_DIM = 128
TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2")
LENGTHS = (32_768, 262_144)
PLAYED_ROWS = 8192
PLAYED_HEADS = 2
# of q, k and the k of one product: the fastest that were tried; the defaults are slower
SPLASH_TILES = 1024, 2048, 512
# the products in each attention kernel
MATMULS = {"flash_attention": 2, "flash_attention_backward": 5} | {
    "splash_mha_fwd_residuals": 2,
    "splash_mha_dkv_no_residuals": 5,
}

type Attention = Callable[[Any, Any, Any], Any]  # [b, s, h, d] on one device of the ring


def compiled(
    attention: Attention, topology: str, rows: int, heads: int, kv_heads: int
) -> fa.check.CompiledProgram:
    mesh = fa.check.topology_mesh(topology, (R,), ("x",), axis_types=(AxisType.Explicit,))
    spec = P(None, "x")
    q, k = (array((1, rows, count, HEAD_DIM), mesh, spec) for count in (heads, kv_heads))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            attention, in_specs=spec, out_specs=spec, check_vma=attention is not tokamax_ring
        )
        return fa.check.compile_for(topology, jax.jit(with_gradients(mapped)), q, k, k, q)


def splash_config() -> Any:
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash

    return splash.SplashConfig(*SPLASH_TILES, *SPLASH_TILES)


def tokamax_ring(q: Any, k: Any, v: Any) -> Any:
    from tokamax._src.ops.experimental.tpu.splash_attention import ring_attention_kernel as ring
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    rows = q.shape[1]
    kernel = ring.make_ring_attention(
        masks.FullMask((rows * R, rows * R)),
        config=splash_config(),
        is_mqa=False,
        ring_axis="x",
        q_seq_shards=R,
        kv_seq_shards=R,
    )
    heads_first = [x[0].swapaxes(0, 1) for x in (q * HEAD_DIM**-0.5, k, v)]
    return kernel(*heads_first).swapaxes(0, 1)[None].astype(q.dtype)


def shares_of_peak() -> dict[str, float]:
    """Returns the share of a v5e's peak that each attention kernel reaches when its bundles are
    played, by its name.
    """
    s = PLAYED_ROWS
    h = PLAYED_HEADS
    d = HEAD_DIM
    mesh = fa.check.topology_mesh("v5e:1x1", (1,), ("x",), axis_types=(AxisType.Explicit,))

    def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return array(shape, mesh, P(), dtype)

    scores = Scores(Mask(False, None), d**-0.5)
    product = Product(0, s, 0, 0, s, 0, False, None)
    q = struct(1, 1, h, s, d)
    kv = struct(2, 1, 1, s, d)
    rows = struct(1, 1, h, 2, s, dtype=jnp.float32)
    sums = struct(1, 1, h, s, d, dtype=jnp.float32)
    kv_sums = struct(2, 1, 1, s, d, dtype=jnp.float32)

    def forward(q: Any, kv: Any, acc: Any, stats: Any) -> Any:
        acc, stats = Flash().forward(BlockOperands(scores, q, kv, None), product, (acc, stats))
        return acc, stats + 1

    def backward(q: Any, kv: Any, do: Any, rows: Any, dq: Any, dkv: Any) -> Any:
        operands = BlockOperands(scores, q, kv, None)
        return Flash().backward(operands, do, rows, product, (dq, dkv))

    programs: list[tuple[Callable, tuple]] = [
        (jax.jit(forward, donate_argnums=2), (q, kv, sums, rows)),
        (jax.jit(backward, donate_argnums=(4, 5)), (q, kv, q, rows, sums, kv_sums)),
    ]
    if has_tokamax():
        from tokamax._src.ops.experimental.tpu.splash_attention import (
            splash_attention_kernel as splash,
        )
        from tokamax._src.ops.experimental.tpu.splash_attention import (
            splash_attention_mask as masks,
        )

        with jax.set_mesh(mesh):
            kernel = splash.make_splash_mha(
                masks.FullMask((s, s)), config=splash_config(), q_seq_shards=1
            )

        def both(q: Any, k: Any, v: Any, do: Any) -> Any:
            return jax.vjp(lambda *qkv: kernel(*qkv), q, k, v)[1](do)

        heads = struct(h, s, d)
        one = struct(1, s, d)
        programs.append((jax.jit(both), (heads, one, one, heads)))
    shares = {}
    for fn, args in programs:
        with jax.set_mesh(mesh):
            played = fa.check.play(fn, *args, topology="v5e:1x1").slowest
        for name, count in MATMULS.items():
            seconds = sum(
                p.seconds for p in played.phases if re.fullmatch(rf"{name}(\.\d+)?( x\d+)?", p.name)
            )
            if seconds:
                shares[name] = 2 * count * h * s * s * d / chip("v5e").flops / seconds
    return shares


def kernel_seconds(
    program: fa.check.CompiledProgram, shares: dict[str, float], rows: int, heads: int
) -> dict[str, float]:
    """Returns the seconds of every attention kernel of a program, by its name: its FLOPs at the
    share that it reaches.

    The kernels of flaxasync state their FLOPs in the program. Each kernel of tokamax multiplies one
    whole block.
    """
    found = {}
    for name, line in re.findall(
        r"%([\w.-]+) = [^\n]*? custom-call\(([^\n]*tpu_custom_call[^\n]*)", program.text
    ):
        stem = re.sub(r"\.\d+$", "", name)
        if stem not in shares:
            continue
        stated = re.search(r'"flops":"(\d+)"', line)
        flops = int(stated[1]) if stated else 0
        if stem.startswith("splash"):
            flops = 2 * MATMULS[stem] * heads * (rows // R) ** 2 * HEAD_DIM
        found[name] = flops / (chip(program.chip).flops * shares[stem])
    return found


def transfers(shares: dict[str, float]) -> str:
    """Prints and returns the table of every transfer of the causal ring, and what is inside it."""
    rows = []
    for topology, length, backend in itertools.product(TOPOLOGIES, LENGTHS, ("xla", "pallas")):
        attention = functools.partial(
            fa.ring_attention, axis_name="x", layout="zigzag", backend=backend
        )
        program = compiled(attention, topology, length, 32, 8)
        audit = fa.check.audit(program, kernels=kernel_seconds(program, shares, length, 32))
        pairs = [p for p in audit.pairs if p.communicates]
        errors = sum(f.count for f in audit.findings if str(f.severity).endswith("error"))
        rows.append(
            [
                topology,
                f"{length:,}",
                backend,
                str(sum(p.runs for p in pairs)),
                str(sum(p.runs for p in pairs if p.overlapped)),
                str(sum(p.runs for p in pairs if not p.exposed)),
                "none" if audit.ok else str(errors),
                f"{program.bytes_by_kind['temporaries'] / 2**20:,.0f}",
            ]
        )
    header = (
        "topology",
        "tokens",
        "backend",
        "transfers",
        "with compute inside",
        "hidden",
        "hazards",
        "temporaries, MiB",
    )
    return print_table(header, rows)


def comparison(shares: dict[str, float]) -> str:
    """Prints and returns the table that compares full attention with tokamax's ring."""
    rows = []
    heads = 8
    for length in LENGTHS:
        base: tuple[float, int] | None = None
        for name in ("tokamax", "none", "xla", "pallas"):
            ours = functools.partial(fa.ring_attention, axis_name="x", causal=False, backend=name)
            program = compiled(
                tokamax_ring if name == "tokamax" else ours, "v5e:2x4", length, heads, 2
            )
            time = fa.check.timeline(
                program, kernels=kernel_seconds(program, shares, length, heads)
            )
            temporaries = program.bytes_by_kind["temporaries"]
            base = base or (time.seconds, temporaries)
            rows.append(
                [
                    f"{length:,}",
                    name,
                    f"{time.seconds * 1e3:.2f}",
                    f"{time.exposed * 1e3:.2f}",
                    f"{temporaries / 2**20:,.0f}",
                    f"{time.seconds / base[0]:.2f}",
                    f"{temporaries / base[1]:.2f}",
                ]
            )
    header = (
        "tokens",
        "backend",
        "estimate, ms",
        "of it waiting, ms",
        "temporaries, MiB",
        "time, tokamax = 1",
        "memory, tokamax = 1",
    )
    return print_table(header, rows)


def has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--tables",
        nargs="+",
        choices=("transfers", "comparison"),
        default=["transfers", "comparison"],
    )
    chosen = parser.parse_args()
    if "comparison" in chosen.tables and not has_tokamax():
        sys.exit(
            "the comparison needs tokamax 0.0.17: pip install '.[bench]', or --tables transfers"
        )
    shares = shares_of_peak()
    print({name: round(share, 3) for name, share in shares.items()})
    for name in chosen.tables:
        make = transfers if name == "transfers" else comparison
        write_between_markers(chosen.write, f"ring {name}", make(shares))


if __name__ == "__main__":
    main()
