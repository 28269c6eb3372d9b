"""Throughput of a training step with our layers and with plain nnx layers, on 8 simulated CPU devices (2 x 4).

    python benchmarks/train_throughput.py [--write README.md]

Every round runs one step of each variant, so that other work on the machine slows all of them, and the speedup over
plain is the median of the ratios within the rounds.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.plain_transformer import PlainTransformer
from benchmarks.table import command_line, print_table, write_between_markers
from configs.tiny import tiny
from models.transformer import Transformer
from train.step.optimizer import make_optimizer

BACKENDS = ("xla", "none")
ROUNDS = 15
HEADER = ("training step on 8 simulated CPU devices (2 x 4)", "layers", "tokens/s", "plain = 1")


def training_step(model: Any, tokens: jax.Array) -> Callable[[], Any]:
    """Compiles a training step of a model with AdamW; returns a function that runs it once and waits for the result."""
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    optimizer = make_optimizer(tiny().optimizer, steps=1000)

    @jax.jit
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda params: nnx.merge(graphdef, params).loss(tokens, tokens))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.jit(optimizer.init)(params)
    compiled = step.lower(params, opt_state, tokens).compile()
    return lambda: jax.block_until_ready(compiled(params, opt_state, tokens))


def measure(steps: dict[str, Callable[[], Any]], tokens: int, title: str) -> list[list[str]]:
    """Runs one step of each variant per round; returns a row per variant, with its speedup over the plain one."""
    for run in steps.values():
        run()
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for done in range(ROUNDS):
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


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    base = tiny()
    wide = dataclasses.replace(base.model, width=4 * base.model.width, mlp_width=4 * base.model.mlp_width)
    batch, length = base.data.batch_size, base.data.sequence_length
    rows = []
    with jax.set_mesh(fa.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, base.model.vocab_size)
        tokens = jax.device_put(tokens, P("data", None))
        for name, config in (("tiny model", base.model), ("4x wider model", wide)):
            models: dict[str, nnx.Module] = {"plain": PlainTransformer(config, rngs=nnx.Rngs(0))}
            models |= {backend: Transformer(config, backend=backend, rngs=nnx.Rngs(0)) for backend in BACKENDS}
            steps = {label: training_step(model, tokens) for label, model in models.items()}
            rows += measure(steps, batch * length, f"{name} (width {config.width})")
    write_between_markers(chosen.write, "throughput", print_table(HEADER, rows))


if __name__ == "__main__":
    main()
