"""How long it takes to trace and to compile the step of a GPT of four layers, with parallel layers
and without.

    python benchmarks/trace_time.py [--rounds 5] [--profile]

"plain" is made of nnx.Linear and nnx.MultiHeadAttention with annotated kernels, whose collective
operations XLA chooses. "flaxasync" is the same model after `flaxasync.nn.parallelize`. A step is
the loss and all gradients. The two alternate in one process, on eight simulated CPU devices, and
what JAX has traced is forgotten before each. Times are those of the processor, as a busy machine
lengthens others; the medians are printed.
"""

import argparse
import cProfile
import dataclasses
import pstats
import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.table import print_table
from flaxasync.nn.adopt.parallel_form import Rule

LAYERS = 4
WIDTH = 128
HEADS = 8
VOCABULARY = 512
BATCH = 4
LENGTH = 64
COLUMNS = {"out_sharding": (None, "model")}
ROWS = {"out_sharding": ("model", None)}
RULES: dict[str, Rule | fa.nn.Fused] = {
    "embed": "embed",
    "blocks.*.attention": "attention",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "output": "column",
}
HEADER = ("program", "trace ms", "of plain", "trace and compile ms", "of plain")


class Block(nnx.Module):
    """Attention and an MLP, each after a norm and added to its input."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            decode=False,
            kernel_metadata={"out_sharding": (None, "model", None)},
            bias_metadata={"out_sharding": ("model", None)},
            out_bias_metadata={"out_sharding": (None,)},
            out_kernel_metadata={"out_sharding": ("model", None, None)},
            rngs=rngs,
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_metadata=COLUMNS, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_metadata=ROWS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x + self.attention(self.norm1(x), is_causal=True)
        return y + self.down(nnx.gelu(self.up(self.norm2(y))))


class GPT(nnx.Module):
    """Turns tokens into logits."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(
            VOCABULARY, WIDTH, embedding_metadata={"out_sharding": ("model", None)}, rngs=rngs
        )
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.output = nnx.Linear(
            WIDTH, VOCABULARY, use_bias=False, kernel_metadata=COLUMNS, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def plain() -> GPT:
    """Makes the model of Flax's layers."""
    return GPT(nnx.Rngs(0))


def parallel() -> GPT:
    """Makes the model of parallel layers."""
    model = GPT(nnx.Rngs(0))
    fa.nn.parallelize(model, RULES, verbose=False)
    return model


def step(model: GPT, tokens: jax.Array) -> tuple[jax.Array, nnx.State]:
    """Returns a loss, and the gradients of all parameters."""

    def loss(model: GPT) -> jax.Array:
        return jnp.mean(jax.nn.logsumexp(model(tokens).astype(jnp.float32), axis=-1))

    return nnx.value_and_grad(loss)(model)


@dataclasses.dataclass
class Seconds:
    """The seconds of each round."""

    trace: list[float] = dataclasses.field(default_factory=list)
    both: list[float] = dataclasses.field(default_factory=list)


def measure(model: GPT, tokens: jax.Array, seconds: Seconds) -> None:
    """Traces and compiles the step of a model once."""
    jax.clear_caches()
    start = time.process_time()
    traced = nnx.jit(step).trace(model, tokens)
    seconds.trace.append(time.process_time() - start)
    traced.lower().compile()
    seconds.both.append(time.process_time() - start)


def profile(model: GPT, tokens: jax.Array) -> None:
    """Prints what the tracing of a step spends its time on."""
    jax.clear_caches()
    with cProfile.Profile() as found:
        nnx.jit(step).trace(model, tokens)
    pstats.Stats(found).sort_stats("cumulative").print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each step is compiled")
    parser.add_argument("--profile", action="store_true", help="print a profile of the tracing")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        tokens = jax.device_put(jnp.zeros((BATCH, LENGTH), jnp.int32), P("data", None))
        models = {"plain": plain(), "flaxasync": parallel()}
        if arguments.profile:
            profile(models["flaxasync"], tokens)
            return
        found = {name: Seconds() for name in models}
        for model in models.values():  # imports, and tables that stay
            measure(model, tokens, Seconds())
        for _ in range(arguments.rounds):
            for name, model in models.items():
                measure(model, tokens, found[name])
    reference = found["plain"]
    rows = []
    for name, seconds in found.items():
        trace = statistics.median(seconds.trace)
        both = statistics.median(seconds.both)
        rows.append(
            (
                name,
                f"{1000 * trace:.0f}",
                f"{trace / statistics.median(reference.trace):.2f}",
                f"{1000 * both:.0f}",
                f"{both / statistics.median(reference.both):.2f}",
            )
        )
    print_table(HEADER, rows)


if __name__ == "__main__":
    main()
