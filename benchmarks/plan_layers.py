"""Does a layer choose well? Whole attention blocks and MLPs, forward and backward, in every form, played without a TPU.

    python benchmarks/plan_layers.py --cache DIR                        all cases: half an hour or more
    python benchmarks/plan_layers.py --cache DIR --write docs/plan.md   also write the table between its markers

CASES were drawn before anything was played, and no cost model was fitted to them. A layer without a backend takes what
is predicted to be fastest for each of its ops, and for attention whether rows or heads travel. The command plays (see
docs/player.md) what the layer chooses and every form that can be named, and fails if a choice takes more than 1.05
times as long as the best form. Programs that were played before are read from DIR.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.step import ring, simulated
from benchmarks.table import print_table, write_between_markers
from flaxasync.check import topology_devices

ALLOWED = 1.05
CHOSEN = "chosen"


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer on a ring of all chips of a topology, in bfloat16.

    Attributes:
      layer: "attention" or "mlp", which is gated.
      topology: The chips.
      batch: The sequences.
      sequence: Their rows.
      width: The features of input and output.
      size: The query heads of 128 features, of which four share a key-value head; or the hidden features.
    """

    layer: str
    topology: str
    batch: int
    sequence: int
    width: int
    size: int


CASES = (
    Case("attention", "v5e:2x4", 2, 2048, 2048, 32),
    Case("attention", "v5e:2x4", 8, 2048, 4096, 32),
    Case("attention", "v5e:2x2", 4, 4096, 2048, 16),
    Case("attention", "v6e:2x4", 1, 4096, 4096, 32),
    Case("attention", "v6e:2x4", 4, 2048, 5120, 64),
    Case("attention", "v6e:2x2", 3, 2048, 3072, 32),
    Case("mlp", "v5e:2x4", 2, 1024, 3072, 8192),
    Case("mlp", "v5e:2x2", 4, 2048, 2560, 10240),
    Case("mlp", "v5e:2x4", 1, 512, 1536, 6144),
    Case("mlp", "v6e:2x4", 4, 2048, 3072, 12288),
    Case("mlp", "v6e:2x2", 2, 1024, 5120, 8192),
    Case("mlp", "v6e:2x2", 1, 512, 2048, 5632),
)
ROWS: dict[str, dict[str, Any]] = {name: {"backend": name} for name in ("none", "xla", "fused")}
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "mlp": ROWS,
    "attention": {name: {"exchange_heads": False, **options} for name, options in ROWS.items()}
    | {"heads travel": {"exchange_heads": True, "backend": "fused"}},
}


def make_layer(case: Case, options: dict[str, Any]) -> nnx.Module:
    """Makes the layer of a case, for the ambient mesh."""
    more: Any = {"dtype": "bfloat16", "param_dtype": "bfloat16", "rngs": nnx.Rngs(0), **options}
    if case.layer == "mlp":
        return fa.nn.ParallelMLP(case.width, case.size, use_bias=False, **more)
    return fa.nn.ParallelSelfAttention(case.width, case.size, kv_heads=case.size // 4, head_dim=128, **more)


def played(case: Case, options: dict[str, Any], cache: pathlib.Path) -> float:
    """Returns the predicted seconds of a layer with all of its gradients."""
    mesh = ring(topology_devices(case.topology), "flaxasync")
    with jax.set_mesh(mesh):
        graph, state = nnx.split(nnx.eval_shape(lambda: make_layer(case, options)))

        def abstract(value: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))

        state = jax.tree.map(abstract, state, nnx.get_partition_spec(state))
        shape = jax.ShapeDtypeStruct((case.batch, case.sequence, case.width), jnp.bfloat16)
        x = abstract(shape, P("data", "model", None))

        def both(state: Any, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
            y, backward = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
            return y, *backward(dy)

        fn: Callable = jax.jit(both)
        content, _, _ = simulated(case.topology, fn, (state, x, x), {}, cache)
    return content["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=pathlib.Path, required=True, metavar="DIR", help="folder of programs played")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose layer and topology contain it")
    parser.add_argument("--write", metavar="FILE", help="file in which the table between the markers is replaced")
    arguments = parser.parse_args()
    rows, worse = [], 0
    for case in CASES:
        if arguments.only not in f"{case.layer} {case.topology}":
            continue
        forms = {CHOSEN: {}, **FORMS[case.layer]}
        seconds = {form: played(case, options, arguments.cache) for form, options in forms.items()}
        best = min(seconds, key=lambda form: seconds[form])
        behind = seconds[CHOSEN] / seconds[best] - 1
        worse += behind > ALLOWED - 1
        times = [f"{seconds[form] * 1e3:.3f}" if form in seconds else "-" for form in (CHOSEN, *FORMS["attention"])]
        sizes = f"{case.batch} x {case.sequence} x {case.width}, {case.size}"
        rows.append((case.layer, case.topology, sizes, *times, best, f"{behind:.1%}"))
        print(*rows[-1], flush=True)
    header = ("layer", "mesh", "batch x rows x features, heads or hidden", "chosen ms",
              *(f"{form} ms" for form in FORMS["attention"]), "best", "behind the best")  # fmt: skip
    text = print_table(header, rows)
    if arguments.write:
        write_between_markers(arguments.write, "plan layers", text)
    sys.exit(f"{worse} of {len(rows)} choices take more than {ALLOWED} times as long as the best" if worse else 0)


if __name__ == "__main__":
    main()
