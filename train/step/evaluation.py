"""How good the model of a run is: its loss on held-out data."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from train.config import Config
from train.data.batches import ValidationBatches, Windows
from train.data.corpus import open_source
from train.lifecycle.errors import InputError

MAIN = "validation"  # name of the validation part of the data, or of all data sources together


class Evaluation:
    """The evaluation sets of a run, whose losses the devices compute while the host goes on.

    The metrics of a set are called after it, as in "validation_loss".
    """

    def __init__(self, validation: dict[str, Windows], config: Config, mesh: jax.sharding.Mesh):
        """Opens the sets that `eval.sets` names, beside the validation windows of each data source,
        by its name.
        """
        self._weights = {name: weight for name, _, weight in config.data.sources}
        windows = validation
        if not self._weights:
            windows = {MAIN: validation["data"]}
        sets = config.eval.sets
        if not config.eval.every:
            sets = ()
        for name, path in sets:
            if name in windows or name == MAIN:
                raise InputError(
                    f"eval.sets must have names of its own: {name} is the validation part of the "
                    "data"
                )
            windows = windows | {name: _open_set(name, path, config)}
        self.windows = windows
        self._sets = {
            name: ValidationBatches(source, config, mesh) for name, source in windows.items()
        }

    def run(self, eval_step: Callable[..., jax.Array], params: PyTree) -> dict[str, jax.Array]:
        """Returns the mean loss of each set in nats per token, as metrics by name.

        With several data sources, "validation_loss" is the mean of their losses by their weights.
        """
        losses = {}
        for name, batches in self._sets.items():
            total = jnp.zeros(2, jnp.float32)
            for batch in batches:
                total = eval_step(params, total, *batch)
            losses[f"{name}_loss"] = total[0] / total[1]
        if self._weights:
            share = 1 / sum(self._weights.values())
            weighted = [
                losses[f"{name}_loss"] * np.float32(weight * share)
                for name, weight in self._weights.items()
            ]
            losses[f"{MAIN}_loss"] = sum(weighted[1:], weighted[0])
        return losses


def _open_set(name: str, path: str, config: Config) -> Windows:
    field = f"the path of {name} in eval.sets"
    corpus = open_source(path, config.data, vocab_size=config.model.vocab_size, field=field)
    windows = Windows(corpus.tokens, config.data.sequence_length, corpus)
    least = config.data.batch_size
    if len(windows) < least:
        has = f"{corpus.name} has {len(windows)}"
        raise InputError(f"{field} must hold one batch of data.batch_size={least} sequences: {has}")
    return windows
