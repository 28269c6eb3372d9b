"""Tests of train/data/batches.py: windows, their order, and the position that is saved."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxasync as fa
from train.data.batches import (
    TrainingBatches,
    ValidationBatches,
    Windows,
    segment_ids,
    share_of_batch,
    split,
)
from train.data.corpus import Corpus, open_corpora
from train.lifecycle.errors import InputError
from train.step.evaluation import Evaluation
from train.step.mesh import make_mesh


def windows_of(tokens, length):
    return Windows(tokens, length, Corpus("here", tokens, is_text=False, vocab_size=2**16))


@given(size=st.integers(0, 200), length=st.integers(1, 50))
def test_every_token_is_a_target_of_one_window(size, length):
    tokens = np.arange(size, dtype=np.uint16)
    windows = windows_of(tokens, length)
    targets = [int(token) for index in range(len(windows)) for token in windows[index][1:]]
    assert targets == list(range(1, 1 + len(windows) * length))
    assert size - 1 - len(targets) < length
    assert all(windows[index].shape == (length + 1,) for index in range(len(windows)))


@pytest.fixture
def config(config, replace):
    """The minuscule run with four sequences per batch."""
    return replace(config, data={"batch_size": 4})


@pytest.fixture
def windows(config):
    training, validation = split(open_corpora(config.data, vocab_size=128), config)
    return training["data"], validation["data"]


def training(windows, config, mesh):
    return TrainingBatches({"data": windows[0]}, config, mesh)


def take(batches, count):
    return [np.asarray(tokens) for tokens, _ in (next(batches) for _ in range(count))]


@pytest.mark.parametrize(
    ("context", "spec"), [(1, jax.P("data", None)), (4, jax.P("data", "context"))]
)
def test_targets_are_the_next_tokens_sharded_and_in_the_order_of_the_mesh(
    context, spec, config, windows, replace
):
    config = replace(config, mesh={"data": 2, "context": context, "model": 4 // context})
    mesh = make_mesh(config.mesh)
    tokens, targets = next(training(windows, config, mesh))
    back = np.argsort(fa.sequence_order("zigzag", 16, context))
    np.testing.assert_array_equal(
        np.asarray(tokens)[:, back][:, 1:], np.asarray(targets)[:, back][:, :-1]
    )
    assert np.array_equal(back, np.arange(16)) == (context == 1)
    assert tokens.shape == (4, 16)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.sharding.spec == spec


def test_the_seed_alone_determines_the_order(config, mesh, windows):
    """It is the same each time and on another mesh."""
    other_mesh = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    first, again, elsewhere = (
        take(training(windows, config, on), 5) for on in (mesh, mesh, other_mesh)
    )
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, elsewhere)
    other = take(training(windows, dataclasses.replace(config, seed=1), mesh), 5)
    assert not np.array_equal(first, other)


@given(
    data=st.sampled_from([1, 2, 4, 8]),
    model=st.sampled_from([1, 2, 4]),
    processes=st.sampled_from([1, 2, 4, 8]),
)
def test_each_process_loads_the_rows_that_its_devices_hold(data, model, processes):
    """Devices belong to processes in order, row by row of the mesh, as `jax.make_mesh` arranges
    them.
    """
    if data * model % processes:
        return
    each, shard_rows = data * model // processes, 3
    loaded = {}
    for process in range(processes):
        devices = range(process * each, (process + 1) * each)
        starts = {device // model * shard_rows for device in devices}
        first, stride = share_of_batch(starts, shard_rows, batch_size=data * shard_rows)
        sequences = list(range(data * shard_rows))[first::stride]
        assert len(sequences) == len(starts) * shard_rows
        loaded.setdefault(min(starts), sequences)
        assert loaded[min(starts)] == sequences, (
            "processes with the same rows must load the same sequences"
        )
    assert sorted(sequence for part in loaded.values() for sequence in part) == list(
        range(data * shard_rows)
    )


def test_each_epoch_has_every_window_once_in_its_own_order(config, mesh):
    windows = windows_of(
        np.arange(16 * 8 + 1, dtype=np.uint16), 16
    )  # 8 windows: two batches an epoch
    batches = TrainingBatches({"data": windows}, config, mesh)
    epochs = [[int(row[0]) // 16 for batch in take(batches, 2) for row in batch] for _ in range(6)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize("before", [0, 1, 7, 400])
def test_batches_continue_from_a_saved_position(before, config, mesh, windows):
    batches = training(windows, config, mesh)
    take(batches, before)
    state = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 3)
    continued = training(windows, config, mesh)
    continued.set_state(state)
    np.testing.assert_array_equal(take(continued, 3), expected)


def test_validation_is_the_end_of_the_tokens_and_the_same_each_time(config, mesh, windows):
    validation = ValidationBatches(windows[1], config, mesh)
    first, again = ([np.asarray(tokens) for tokens, _ in validation] for _ in range(2))
    assert len(first) == 2
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[0][0], windows[1][0][:-1])
    everything = open_corpora(config.data, vocab_size=128)["data"].tokens
    assert windows[0].tokens.size + windows[1].tokens.size == everything.size
    np.testing.assert_array_equal(windows[1].tokens, everything[-windows[1].tokens.size :])


def test_data_that_is_too_short_is_refused(config, replace):
    def corpus(size):
        return {"data": Corpus("here", np.zeros(size, np.uint8), is_text=True, vocab_size=1)}

    with pytest.raises(
        InputError, match=r"one sequence of data.sequence_length \+ 1 = 17 tokens: here has 16"
    ):
        split(corpus(16), config)
    with pytest.raises(InputError, match="leaves 9 of 17 tokens for training"):
        split(corpus(17), replace(config, data={"validation_fraction": 0.49}))
    with pytest.raises(InputError, match=r"one batch of data.batch_size=4 sequences: it has 1"):
        split(corpus(400), config)
    split(corpus(400), replace(config, eval={"every": 0}))


def test_a_batch_of_another_size_continues_the_same_sequences(config, mesh, windows, replace):
    whole = np.concatenate(take(training(windows, config, mesh), 6))
    first, second = (
        TrainingBatches({"data": windows[0]}, replace(config, data={"batch_size": size}), mesh)
        for size in (4, 8)
    )
    begun = take(first, 2)
    second.set_state(first.get_state())
    np.testing.assert_array_equal(np.concatenate([*begun, *take(second, 2)]), whole)
    with pytest.raises(InputError, match=r"data.batch_size=8 cannot continue after 12 sequences"):
        second.set_state({"sequences": 12})


def test_several_sources_are_mixed_by_their_weights(config, mesh, replace):
    sources = {
        name: windows_of(np.full(17 * 64, value, np.uint8), 16)
        for name, value in (("a", 1), ("b", 2))
    }
    config = replace(config, data={"sources": (("a", "", 3.0), ("b", "", 1.0))})
    taken = np.concatenate(take(TrainingBatches(sources, config, mesh), 10))[:, 0]
    assert (taken == 1).sum() == 30
    assert (taken == 2).sum() == 10


def test_segment_ids_count_the_documents_that_have_ended():
    tokens = np.array([[5, 0, 6, 7, 0, 0, 8], [5, 5, 5, 5, 5, 5, 5]])
    np.testing.assert_array_equal(segment_ids(tokens, 0), [[0, 0, 1, 1, 1, 2, 3], [0] * 7])


@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_token_that_is_no_longer_in_the_vocabulary_ends_the_run(
    part, config, tmp_path, replace, mesh
):
    """The file is written in place, after its tokens were checked and while it is mapped."""
    path = tmp_path / "a.bin"
    np.full(8000, 7, np.uint16).tofile(path)
    config = replace(config, data={"path": str(path)})
    corpora = open_corpora(config.data, vocab_size=128)
    training, validation = split(corpora, config)
    batches = TrainingBatches(training, config, mesh)
    next(batches)
    mapped = np.memmap(path, np.uint16, "r+")
    mapped[:] = 60000
    mapped.flush()
    if part == "validation":
        batches = iter(ValidationBatches(validation["data"], config, mesh))
    with pytest.raises(
        InputError, match=r"data.path: .*a.bin must stay as it is while a run reads it"
    ):
        take(batches, 12)  # some were read ahead
    with pytest.raises(InputError, match="must stay as it is"):
        corpora["data"].require_unchanged()


def test_the_file_of_an_evaluation_set_is_compared_as_well(config, tmp_path, replace, mesh):
    path = tmp_path / "held_out.txt"
    path.write_bytes(b"a text of its own, " * 100)
    config = replace(config, eval={"sets": (("held_out", str(path)),)})
    validation = split(open_corpora(config.data, vocab_size=128), config)[1]
    windows = Evaluation(validation, config, mesh).windows
    for each in windows.values():
        each.corpus.require_unchanged()
    with open(path, "r+b") as file:
        file.write(b"another")
    with pytest.raises(
        InputError, match=r"the path of held_out in eval.sets: .*held_out.txt must stay as it is"
    ):
        windows["held_out"].corpus.require_unchanged()
    windows["validation"].corpus.require_unchanged()
