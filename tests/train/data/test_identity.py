"""Tests of train/data/identity.py and train/checkpoints/record.py: other data, or a changed record, are noticed."""

import dataclasses

import numpy as np
import pytest

from train.checkpoints.record import DamagedError, from_json, identify_run
from train.data import identity
from train.data.corpus import Corpus
from train.data.identity import HashCache, differences, identify
from train.lifecycle.errors import InputError


@pytest.fixture
def cache(tmp_path):
    return HashCache(tmp_path / "corpus.json")


def corpus(tokens, **fields):
    return Corpus("text", np.asarray(tokens, np.uint8), is_text=True, **fields)


def test_any_other_data_are_told_from_the_saved_ones(cache):
    tokens = np.arange(100_000) % 251
    saved = {"data": dataclasses.asdict(identify(corpus(tokens), None, cache))}
    one_byte = tokens.copy()
    one_byte[77_777] ^= 1
    for changed, said in (
        (tokens[::-1], "source data: it has as many tokens, and other ones"),
        (one_byte, "source data: it has as many tokens, and other ones"),
        (tokens[:50_000], "source data: tokens was 100000 and is 50000"),
    ):
        assert differences(saved, {"data": identify(corpus(changed), None, cache)}) == [said]
    assert differences(saved, {"data": identify(corpus(tokens), None, cache)}) == []
    assert differences(saved, {"data": identify(corpus(tokens), "gpt2", cache)}) == [
        "source data: tokenizer was bytes and is gpt2"
    ]
    assert differences(saved, {}) == ["source data is only there"]


def test_a_large_file_is_hashed_again_only_when_it_was_modified(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "CACHED_BYTES", 1)
    hashed, path = [], tmp_path / "tokens.bin"
    path.write_bytes(b"abcd")
    whole = identity.hash_all
    monkeypatch.setattr(identity, "hash_all", lambda tokens: hashed.append(1) or whole(tokens))
    mapped = corpus(np.frombuffer(b"abcd", np.uint8), file=path)
    assert cache.whole(mapped) == cache.whole(mapped) == whole(mapped.tokens)
    assert len(hashed) == 1
    path.write_bytes(b"abcde")
    cache.whole(mapped)
    assert len(hashed) == 2


def test_a_cache_that_cannot_be_written_does_not_end_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "CACHED_BYTES", 1)
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"abcd")
    mapped = corpus(np.frombuffer(b"abcd", np.uint8), file=path)
    assert HashCache(tmp_path / "missing" / "corpus.json").whole(mapped) == identity.hash_all(mapped.tokens)


@pytest.fixture
def record(config):
    return identify_run(config, {}).make_record(10, {"sequences": 80}, 1280, ["params"], {"params.a": 7})


@pytest.mark.parametrize("change", [{"step": 11}, {"data": {"sequences": 88}}, {"fingerprint": {}}, {"checksum": ""}])
def test_a_changed_record_is_damaged(change, record):
    assert from_json(record.to_json()) == record
    with pytest.raises(DamagedError, match="the record is not what was saved"):
        from_json(record.to_json() | change)


def test_a_record_of_another_format_is_refused(record):
    with pytest.raises(InputError, match="version 1 of the format, and this code reads 2"):
        from_json({"data": {}})


def test_another_seed_is_other_data(config, record):
    other = identify_run(dataclasses.replace(config, seed=3), {})
    with pytest.raises(InputError, match=r"the data are not those of here: seed was 0 and is 3\..*accept_change"):
        other.require_same(record, where="here", accept_change=False)
    assert other.require_same(record, where="here", accept_change=True) == ["seed was 0 and is 3"]
