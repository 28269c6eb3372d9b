"""A training script with the structure of Flax's NNX examples. It knows nothing of flaxasync.

Run as a script, it prints its arguments.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def loss_fn(model, batch):
    logits = model(batch["image"]).mean((1, 2))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    metrics.update(loss=loss)
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, batch):
    metrics.update(loss=loss_fn(model, batch))


def train(steps: int = 2) -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.relu,
                           nnx.Linear(4, 10, rngs=rngs))  # fmt: skip
    optimizer = nnx.Optimizer(model, optax.adamw(0.005), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    batch = {
        "image": jax.random.normal(jax.random.key(0), (8, 8, 8, 1)),
        "label": jnp.arange(8) % 10,
    }
    for _ in range(steps):
        model.train()
        train_step(model, optimizer, metrics, batch)
        model.eval()
        eval_step(model, metrics, batch)


if __name__ == "__main__":
    train()
    print(sys.argv[1:])
