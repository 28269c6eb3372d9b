"""Tokens a second of a training step, ours against plain nnx with automatic sharding; temporary bytes on a TPU.

    python benchmarks/train_throughput.py [--rounds N] [--write README.md]

Throughput is measured on 8 simulated CPU devices (data 2 x model 4), all variants in turn, round by round, so that a
busy machine slows all of them: the table gives the median over rounds of each round's ratio to plain. The bytes are the
TPU compiler's own, for v5e:2x4, with no TPU; that part needs libtpu.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from plain_transformer import PlainMLP, PlainTransformer
from table import print_table, write_between_markers

import flaxasync as fa
import flaxasync.check
from configs.tiny import tiny
from models.transformer import Transformer, TransformerConfig
from train.optimizer import make_optimizer

BACKENDS = ("xla", "none")
TPU, MLP_SHAPE = "v5e:2x4", {"batch": 8, "rows": 2048, "features": 8192, "hidden": 28672}


class Stack(nnx.Module):
    """Residual MLPs, scanned; the loss is the mean square of what comes out."""

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


def training_step(model: nnx.Module, batch: tuple[jax.Array, ...]) -> Callable[[], Any]:
    """Compiles value, gradient and AdamW update of a model; returns a function that runs it once, to the end."""
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
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
    """Runs all steps in turn; returns a row for each: tokens a second, and the ratio to the first."""
    for run in steps.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(rounds):
        # Each round begins with another one: what ran before a step changes what it costs.
        for name in [*steps][done % len(steps) :] + [*steps][: done % len(steps)]:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
        if sys.stdout.isatty():
            print(f"\r{title}: round {done + 1} of {rounds}", end="", flush=True)
    print(f"{'\r' if sys.stdout.isatty() else ''}{title}: {rounds} rounds", flush=True)
    first = next(iter(steps))
    rows = []
    for name, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[first], own, strict=True))
        rows.append([title, name, f"{tokens / statistics.median(own):,.0f}", f"{ratio:.2f}"])
    return rows


def throughput(rounds: int) -> list[list[str]]:
    """The rows of all three programs."""
    base = tiny()
    wide = dataclasses.replace(base.model, width=4 * base.model.width, mlp_width=4 * base.model.mlp_width)
    batch, length = base.data.batch_size, base.data.sequence_length
    rows = []
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, base.model.vocab_size)
        tokens = jax.device_put(tokens, P("data", None))
        for name, config in (("tiny model", base.model), ("4x wider model", wide)):
            models = {"plain": PlainTransformer(config, rngs=nnx.Rngs(0))}
            models |= {b: Transformer(config, backend=b, rngs=nnx.Rngs(0)) for b in BACKENDS}
            steps = {label: training_step(model, (tokens, tokens)) for label, model in models.items()}
            rows += measure(steps, batch * length, rounds, f"{name} (width {config.width})")
        x = jax.device_put(jax.random.normal(jax.random.key(0), (16, 256, 512)), P("data", "model", None))
        mlp = dataclasses.replace(wide, width=512, mlp_width=2048)
        stacks = {"plain": Stack(lambda rngs: PlainMLP(mlp, rngs=rngs), 4, rngs=nnx.Rngs(0))}
        stacks |= {b: Stack(lambda rngs, b=b: parallel_mlp(mlp, b, rngs), 4, rngs=nnx.Rngs(0)) for b in BACKENDS}
        steps = {label: training_step(stack, (x,)) for label, stack in stacks.items()}
        rows += measure(steps, 16 * 256, rounds, "4 MLPs alone (512, 2048)")
    return rows


def parallel_mlp(config: TransformerConfig, backend: str, rngs: nnx.Rngs, *, gated: bool = True) -> fa.nn.ParallelMLP:
    """Our MLP in the dtypes of a config."""
    dtypes = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
    return fa.nn.ParallelMLP(config.width, config.mlp_width, gated=gated, backend=backend, **dtypes, rngs=rngs)


def temporary_bytes() -> list[list[str]]:
    """The compiler's temporary bytes a device of an MLP's forward pass, not gated, for a TPU."""
    shape = MLP_SHAPE
    config = TransformerConfig(
        width=shape["features"], mlp_width=shape["hidden"], dtype="bfloat16", param_dtype="bfloat16"
    )
    mesh = fa.check.topology_mesh(TPU, (1, 8), ("data", "model"))
    x = jax.ShapeDtypeStruct(
        (shape["batch"], shape["rows"], shape["features"]),
        jnp.bfloat16,
        sharding=jax.NamedSharding(mesh, P("data", "model", None)),
    )
    makers: dict[str, Callable[[], nnx.Module]] = {"plain": lambda: PlainMLP(config, gated=False, rngs=nnx.Rngs(0))}
    makers |= {b: lambda b=b: parallel_mlp(config, b, nnx.Rngs(0), gated=False) for b in BACKENDS}
    sizes = {}
    for name, make in makers.items():
        with jax.set_mesh(mesh):
            graphdef, params = nnx.split(nnx.eval_shape(make))
            params = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                params,
                nnx.get_named_sharding(params, mesh),
            )
            forward = jax.jit(lambda params, x, graphdef=graphdef: nnx.merge(graphdef, params)(x))
            program = fa.check.compile_for(TPU, forward, params, x)
        sizes[name] = program.memory["temp_size_in_bytes"]
    return [[name, f"{size / 2**20:,.0f}", f"{size / sizes['plain']:.2f}"] for name, size in sizes.items()]


def main() -> None:
    """Measures, prints, and writes where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="training steps of each variant (default: 15)")
    parser.add_argument("--write", metavar="FILE", help="replace the tables between FILE's markers")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    speed = print_table(
        ["training step on 8 simulated CPU devices (2 x 4)", "layers", "tokens/s", "plain = 1"], throughput(args.rounds)
    )
    title = "MLP forward, not gated, B{batch} S{rows} D{features} F{hidden} bf16, compiled for ".format(**MLP_SHAPE)
    memory = print_table([title + TPU, "temporary MiB a device", "plain = 1"], temporary_bytes())
    if args.write:
        write_between_markers(args.write, "throughput", f"{speed}\n\n{memory}")


if __name__ == "__main__":
    main()
