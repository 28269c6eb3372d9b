"""Throughput of a training step with our layers and with plain nnx layers, and temporary memory on a TPU.

    python benchmarks/train_throughput.py [--rounds N] [--write README.md]

Throughput is measured on 8 simulated CPU devices (data 2 x model 4). Every round runs one step of each variant, so that
other work on the machine slows all of them, and the speedup over plain is the median of the ratios within the rounds.
The memory figures are those of the TPU compiler for v5e:2x4. They need libtpu, but no TPU.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.plain_transformer import PlainMLP, PlainTransformer
from benchmarks.programs import array, split_layer
from benchmarks.table import command_line, print_table, write_between_markers
from configs.tiny import tiny
from models.config import TransformerConfig
from models.transformer import Transformer
from train.step.optimizer import make_optimizer

BACKENDS = ("xla", "none")
TPU, MLP_SHAPE = "v5e:2x4", {"batch": 8, "rows": 2048, "features": 8192, "hidden": 28672}
SPEED_HEADER = ("training step on 8 simulated CPU devices (2 x 4)", "layers", "tokens/s", "plain = 1")
MEMORY_HEADER = (
    "MLP forward, not gated, B{batch} S{rows} D{features} F{hidden} bf16, compiled for ".format(**MLP_SHAPE) + TPU,
    "temporary MiB a device", "plain = 1",
)  # fmt: skip


class Stack(nnx.Module):
    """A stack of residual MLPs as one scan, whose loss is the mean square of its output."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], layers: int, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> nnx.Module:
            return make(rngs)

        self.layers = stack(rngs)

    def loss(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: None})
        def run(layer: Any, x: jax.Array) -> jax.Array:
            return x + layer(x)

        return jnp.mean(run(self.layers, x) ** 2)


def make_mlp(name: str, config: TransformerConfig, rngs: nnx.Rngs, *, gated: bool = True) -> nnx.Module:
    """Makes the plain MLP, or the parallel one with a backend, with the sizes and dtypes of a config."""
    if name == "plain":
        return PlainMLP(config, gated=gated, rngs=rngs)
    dtypes: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
    return fa.nn.ParallelMLP(config.width, config.mlp_width, gated=gated, backend=name, **dtypes, rngs=rngs)


def training_step(model: Any, batch: tuple[jax.Array, ...]) -> Callable[[], Any]:
    """Compiles a training step of a model with AdamW; returns a function that runs it once and waits for the result."""
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    optimizer = make_optimizer(tiny().optimizer, steps=1000)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: nnx.merge(graphdef, params).loss(*batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.jit(optimizer.init)(params)
    compiled = step.lower(params, opt_state, batch).compile()
    return lambda: jax.block_until_ready(compiled(params, opt_state, batch))


def measure(steps: dict[str, Callable[[], Any]], tokens: int, rounds: int, title: str) -> list[list[str]]:
    """Runs one step of each variant per round; returns a row per variant, with its speedup over the plain one."""
    for run in steps.values():
        run()
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for done in range(rounds):
        # Each round begins with another variant, because the time of a step depends on what ran before it.
        first = done % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["plain"], own, strict=True))
        rows.append([title, name, f"{tokens / statistics.median(own):,.0f}", f"{ratio:.2f}"])
    return rows


def throughput(rounds: int) -> list[list[str]]:
    """Measures both models and the MLPs alone; returns the rows of the table."""
    base = tiny()
    wide = dataclasses.replace(base.model, width=4 * base.model.width, mlp_width=4 * base.model.mlp_width)
    batch, length = base.data.batch_size, base.data.sequence_length
    rows = []
    with jax.set_mesh(fa.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, base.model.vocab_size)
        tokens = jax.device_put(tokens, P("data", None))
        for name, config in (("tiny model", base.model), ("4x wider model", wide)):
            models: dict[str, nnx.Module] = {"plain": PlainTransformer(config, rngs=nnx.Rngs(0))}
            models |= {b: Transformer(config, backend=b, rngs=nnx.Rngs(0)) for b in BACKENDS}
            steps = {label: training_step(model, (tokens, tokens)) for label, model in models.items()}
            rows += measure(steps, batch * length, rounds, f"{name} (width {config.width})")
        x = jax.device_put(jax.random.normal(jax.random.key(0), (16, 256, 512)), P("data", "model", None))
        mlp = dataclasses.replace(wide, width=512, mlp_width=2048)
        steps = {}
        for label in ("plain", *BACKENDS):
            stack = Stack(functools.partial(make_mlp, label, mlp), 4, rngs=nnx.Rngs(0))
            steps[label] = training_step(stack, (x,))
        rows += measure(steps, 16 * 256, rounds, "4 MLPs alone (512, 2048)")
    return rows


def temporary_bytes() -> list[list[str]]:
    """Compiles the forward pass of an ungated MLP for a TPU; returns rows of its temporary memory per device."""
    batch, rows, features, hidden = MLP_SHAPE.values()
    config = TransformerConfig(width=features, mlp_width=hidden, dtype="bfloat16", param_dtype="bfloat16")
    mesh = fa.check.topology_mesh(TPU, (1, 8), ("data", "model"))
    x = array((batch, rows, features), mesh, P("data", "model", None))
    sizes = {}
    for name in ("plain", *BACKENDS):
        with jax.set_mesh(mesh):
            make = functools.partial(make_mlp, name, config, nnx.Rngs(0), gated=False)
            graph, params = split_layer(make, mesh)
            forward = jax.jit(lambda params, x, graph=graph: nnx.merge(graph, params)(x))
            sizes[name] = fa.check.compile_for(TPU, forward, params, x).bytes_by_kind["temporaries"]
    return [[name, f"{size / 2**20:,.0f}", f"{size / sizes['plain']:.2f}"] for name, size in sizes.items()]


def main() -> None:
    """Measures, prints the tables, and writes them to a file on request."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of one step of every variant (default: 15)")
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    speed = print_table(SPEED_HEADER, throughput(chosen.rounds))
    memory = print_table(MEMORY_HEADER, temporary_bytes())
    write_between_markers(chosen.write, "throughput", f"{speed}\n\n{memory}")


if __name__ == "__main__":
    main()
