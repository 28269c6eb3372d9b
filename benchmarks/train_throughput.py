"""Throughput of a training step with our layers and with plain nnx layers, on the 8 simulated CPU
devices of a preset.

    python benchmarks/train_throughput.py [--write README.md]
    python benchmarks/train_throughput.py --experts [--write docs/moe.md]

With --experts it is the model of configs/tiny_moe.py with its mixtures, or with plain ones in their
place, in which all experts are applied to all rows, and masked.

Every round runs one step of each variant, so that other work on the machine slows all of them, and
the speedup over plain is the median of the ratios within the rounds.
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
from benchmarks.plain_transformer import PlainExperts, PlainTransformer
from benchmarks.table import command_line, print_table, write_between_markers
from configs.tiny import tiny
from configs.tiny_moe import tiny_moe
from models.config import TransformerConfig
from models.transformer import Transformer
from train.step.optimizer import make_optimizer

BACKENDS = ("xla", "none")
EXPERT_BACKENDS = ("none", "xla")
ROUNDS = 15


def training_step(model: Any, tokens: jax.Array) -> Callable[[], Any]:
    """Compiles a training step of a model with AdamW; returns a function that runs it once and
    waits for the result.
    """
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    optimizer = make_optimizer(tiny().optimizer, steps=1000)

    @jax.jit
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(
            lambda params: nnx.merge(graphdef, params).loss(tokens, tokens)
        )(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.jit(optimizer.init)(params)
    compiled = step.lower(params, opt_state, tokens).compile()
    return lambda: jax.block_until_ready(compiled(params, opt_state, tokens))


def with_plain_experts(config: TransformerConfig) -> Transformer:
    """Makes our decoder with plain experts in place of our mixtures."""
    model: Any = Transformer(config, backend="none", rngs=nnx.Rngs(0))

    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def stack(rngs: nnx.Rngs) -> PlainExperts:
        return PlainExperts(config, rngs=rngs)

    model.layers.mlp = stack(nnx.Rngs(0))
    return model


def measure(steps: dict[str, Callable[[], Any]], tokens: int, title: str) -> list[list[str]]:
    """Runs one step of each variant per round; returns a row per variant, with its speedup over the
    plain one.
    """
    for run in steps.values():
        run()
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for done in range(ROUNDS):
        # Each round begins with another variant, because the time of a step depends on what ran
        # before it.
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
    parser = command_line(__doc__)
    parser.add_argument(
        "--experts", action="store_true", help="the mixture of experts of configs/tiny_moe.py"
    )
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    base, backends = (tiny_moe(), EXPERT_BACKENDS) if chosen.experts else (tiny(), BACKENDS)
    configs = {"tiny_moe" if chosen.experts else "tiny model": base.model}
    if not chosen.experts:
        width = 4 * base.model.width
        configs["4x wider model"] = dataclasses.replace(
            base.model, width=width, mlp_width=4 * base.model.mlp_width
        )
    batch = base.data.batch_size
    length = base.data.sequence_length
    rows = []
    sizes = (base.mesh.data, base.mesh.model)
    with jax.set_mesh(fa.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, base.model.vocab_size)
        tokens = jax.device_put(tokens, P("data", None))
        for name, config in configs.items():
            plain = (
                with_plain_experts(config)
                if chosen.experts
                else PlainTransformer(config, rngs=nnx.Rngs(0))
            )
            models: dict[str, nnx.Module] = {"plain": plain}
            models |= {
                backend: Transformer(config, backend=backend, rngs=nnx.Rngs(0))
                for backend in backends
            }
            steps = {label: training_step(model, tokens) for label, model in models.items()}
            rows += measure(steps, batch * length, f"{name} (width {config.width})")
    title = f"training step on 8 simulated CPU devices ({sizes[0]} x {sizes[1]})"
    table = print_table((title, "layers", "tokens/s", "plain = 1"), rows)
    write_between_markers(chosen.write, "moe_throughput" if chosen.experts else "throughput", table)


if __name__ == "__main__":
    main()
