"""A training script with the structure of Flax's NNX examples. It knows nothing of flaxasync.

Run as a script, it prints its arguments.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4 * 4 * 4, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), window_shape=(2, 2), strides=(2, 2))
        return self.linear(x.reshape(x.shape[0], -1))


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    metrics.update(loss=loss)
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, batch):
    metrics.update(loss=loss_fn(model, batch))


def train(steps: int = 2) -> dict:
    model = CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.005), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    batch = {"image": jax.random.normal(jax.random.key(0), (8, 8, 8, 1)), "label": jnp.arange(8) % 10}
    for _ in range(steps):
        model.train()
        train_step(model, optimizer, metrics, batch)
        model.eval()
        eval_step(model, metrics, batch)
    return metrics.compute()


if __name__ == "__main__":
    train()
    print(sys.argv[1:])
