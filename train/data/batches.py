"""Batches of token windows: shuffled, mixed, endless, and able to continue from a saved position.

The tokens of each source are divided into windows of `sequence_length + 1`. Each window begins with
the last token of the one before it, so that every token is a target once per epoch. The seed
determines the order of the windows, which differs between epochs. The windows of several sources
are mixed by their weights into one stream of sequences, and a position is the number of sequences
that were taken from it, so the stream does not depend on the size of the batches.

Every process loads only the rows of a batch that its own devices hold. If the mesh splits
sequences, positions are reordered here, once.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, SupportsIndex

import grain
import jax
import numpy as np

import flaxasync as fa
from train.config import Config
from train.data.corpus import Corpus
from train.lifecycle.errors import InputError
from train.step.mesh import CONTEXT, batch_shards, token_spec

Batch = tuple[jax.Array, ...]
"""Tokens, targets and, if data.separator is set, segment ids: int32 [batch, sequence] each, in the
order of the mesh.

The target of a position is the token of the next position. The segment id of a position is the
number of documents that end before it in its sequence.
"""


@dataclasses.dataclass(frozen=True)
class Windows:
    """A random-access data source for grain, whose elements are the windows of a token array."""

    tokens: np.ndarray  # 1-D, of any unsigned type; mapped files stay on disk
    length: int  # L, the number of tokens that the model sees
    # what the tokens are a part of, which checks them again when they are read
    corpus: Corpus
    first: int = 0  # where in the corpus the tokens begin

    def __len__(self) -> int:
        return max(0, (self.tokens.size - 1) // self.length)

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """Returns one window, int32 [L + 1]."""
        start = int(index) * self.length
        # a copy, which nobody writes any more
        window = np.array(self.tokens[start : start + self.length + 1])
        self.corpus.check_window(window, self.first + start)
        return window.astype(np.int32)


def split(
    corpora: dict[str, Corpus], config: Config
) -> tuple[dict[str, Windows], dict[str, Windows]]:
    """Splits each source into windows for training and, from the end of its tokens, windows for
    validation.
    """
    training = dict[str, Windows]()
    validation = dict[str, Windows]()
    length = config.data.sequence_length
    batch_size = config.data.batch_size
    for name, corpus in corpora.items():
        size = corpus.tokens.size
        least = length + 1
        if size < least:
            raise InputError(
                f"data must hold one sequence of data.sequence_length + 1 = {least} tokens: "
                f"{corpus.name} has {size}"
            )
        border = size - round(size * config.data.validation_fraction)
        training[name] = Windows(corpus.tokens[:border], length, corpus)
        validation[name] = Windows(corpus.tokens[border:], length, corpus, border)
        if not len(training[name]):
            raise InputError(
                f"data.validation_fraction={config.data.validation_fraction} leaves {border} of "
                f"{size} tokens for training, fewer than one sequence of {length} + 1; lower it"
            )
        if config.eval.every and len(validation[name]) < batch_size:
            raise InputError(
                f"the validation part of {corpus.name} must hold one batch of "
                f"data.batch_size={batch_size} sequences: it has {len(validation[name])}; raise "
                "data.validation_fraction, or set eval.every to 0"
            )
    return training, validation


class TrainingBatches:
    """An endless iterator over global batches, which a thread prefetches; its position can be saved
    and restored.
    """

    def __init__(self, windows: dict[str, Windows], config: Config, mesh: jax.sharding.Mesh):
        self._sharding = _BatchSharding(config, mesh)
        self._batch_size = config.data.batch_size
        shuffled = [
            grain.MapDataset.source(source).shuffle(seed=config.seed).repeat()
            for source in windows.values()
        ]
        weights = [weight for _, _, weight in config.data.sources]
        dataset = shuffled[0] if len(shuffled) == 1 else grain.MapDataset.mix(shuffled, weights)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self._iterator = iter(self._sharding.local(dataset).to_iter_dataset(options))

    def __next__(self) -> Batch:
        return self._sharding.to_global(next(self._iterator))

    def get_state(self) -> dict[str, Any]:
        """Returns the position as JSON data; it is the same in every process, however many there
        are.
        """
        return {"sequences": self._iterator.get_state()["next_index"] * self._batch_size}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the last batch that had been taken when `get_state` returned `state`."""
        batches, rest = divmod(state["sequences"], self._batch_size)
        if rest:
            raise InputError(
                f"data.batch_size={self._batch_size} cannot continue after {state['sequences']} "
                "sequences, which is no multiple of it; use a batch size that divides "
                f"{state['sequences']}, or the checkpoint of another step"
            )
        self._iterator.set_state({"next_index": batches})


class ValidationBatches:
    """The first `eval.batches` batches of some windows, or as many as there are, the same each
    time.
    """

    def __init__(self, windows: Windows, config: Config, mesh: jax.sharding.Mesh):
        self._sharding = _BatchSharding(config, mesh)
        self._dataset = self._sharding.local(grain.MapDataset.source(windows))
        self._length = min(config.eval.batches, len(windows) // config.data.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return (self._sharding.to_global(self._dataset[index]) for index in range(self._length))


def segment_ids(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Numbers the documents of each row, [rows, length]; a separator belongs to the document that
    it ends.
    """
    ends = tokens == separator
    return (np.cumsum(ends, axis=1) - ends).astype(np.int32)


def share_of_batch(starts: set[int], shard_rows: int, *, batch_size: int) -> tuple[int, int]:
    """Returns which sequences of a batch a process loads, as the first one and the stride.

    `starts` has the first row of each shard that its devices hold; processes that split only the
    model axis share them.
    """
    rows = len(starts) * shard_rows
    return min(starts) // rows, batch_size // rows


class _BatchSharding:
    """How a batch lies on the mesh: selects the rows of this process and makes global arrays of
    them.
    """

    def __init__(self, config: Config, mesh: jax.sharding.Mesh):
        self._sharding = jax.NamedSharding(mesh, token_spec(mesh))
        self._shape = (config.data.batch_size, config.data.sequence_length)
        shards = [
            s
            for s in self._sharding.addressable_devices_indices_map(self._shape).values()
            if s is not None
        ]
        starts = {index[0].indices(self._shape[0])[0] for index in shards}
        # The positions that the devices of this process hold are all positions, unless processes
        # split sequences.
        columns = {
            column for index in shards for column in range(*index[1].indices(self._shape[1]))
        }
        order = fa.sequence_order(
            config.mesh.context_layout, self._shape[1], mesh.shape.get(CONTEXT, 1)
        )
        self._positions = order[sorted(columns)]
        self._separator = config.data.separator
        self._share = share_of_batch(
            starts, self._shape[0] // batch_shards(mesh.shape), batch_size=self._shape[0]
        )

    def local(self, dataset: grain.MapDataset) -> grain.MapDataset:
        """Selects the windows of this process and stacks them, [rows of this process, L + 1]."""
        first, stride = self._share
        return dataset.slice(slice(first, None, stride)).batch(
            self._shape[0] // stride, drop_remainder=True
        )

    def to_global(self, windows: np.ndarray) -> Batch:
        """Makes the global batch from the windows of this process."""
        parts = [windows[:, self._positions], windows[:, self._positions + 1]]
        if self._separator is not None:
            parts.append(segment_ids(windows[:, :-1], self._separator)[:, self._positions])
        return tuple(
            jax.make_array_from_process_local_data(self._sharding, part, self._shape)
            for part in parts
        )
