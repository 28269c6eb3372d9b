"""Tests of train/checkpoints/record.py: a changed record or array, other data and another
architecture are noticed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.checkpoints.record import (
    DamagedError,
    Record,
    architecture,
    check_identity,
    check_parameters,
    fingerprint,
    identify_run,
)
from train.data.corpus import Corpus, identify
from train.lifecycle.errors import InputError

TOKENS = np.arange(100_000) % 251


def corpus(tokens):
    return Corpus("text", np.asarray(tokens, np.uint8), is_text=True, vocab_size=256)


@pytest.fixture
def record(config):
    known = identify_run(config, {"data": identify(corpus(TOKENS), None)})
    return Record(
        **vars(known),
        step=10,
        data={"sequences": 80},
        tokens=1280,
        parts=["params"],
        fingerprint={"params.a": 7},
    )


@pytest.mark.parametrize(("tokens", "tokenizer", "said"), [
    (TOKENS[::-1], None, ["content_hash"]),
    (np.where(np.arange(TOKENS.size) == 77_777, 0, TOKENS), None, ["content_hash"]),
    (TOKENS[:50_000], None, ["tokens was 100000 and is 50000", "content_hash"]),
    (TOKENS, "gpt2", ["tokenizer was bytes and is gpt2"]),
], ids=["reversed", "one token", "half", "another tokenizer"])  # fmt: skip
def test_other_data_are_refused_unless_they_are_accepted(tokens, tokenizer, said, config, record):
    other = identify_run(config, {"data": identify(corpus(tokens), tokenizer)})
    with pytest.raises(
        InputError, match=r"the data are not those of here: .*--data.accept_change True"
    ):
        check_identity(record, other, where="here", accept_change=False)
    changes = check_identity(record, other, where="here", accept_change=True)
    assert len(changes) == len(said)
    for change, part in zip(changes, said, strict=True):
        assert change.startswith(f"source data: {part}")


def test_another_seed_or_source_is_other_data(config, record):
    other = identify_run(dataclasses.replace(config, seed=3), {})
    changes = check_identity(record, other, where="here", accept_change=True)
    assert changes[0] == "seed was 0 and is 3"
    assert "source data: tokens was 100000 and is absent" in changes


def test_the_architecture_does_not_depend_on_how_the_model_is_computed(config, replace):
    free = {"dtype": "bfloat16", "remat": "dots", "fsdp_overlap": "prefetch"}
    assert architecture(config) == architecture(replace(config, model=free))
    assert architecture(config)["model.kv_heads"] == 8
    others = {name for name in architecture(config) if not name.startswith("model.")}
    assert others == {"optimizer.master_copies", "optimizer.first_moment_dtype"}


def test_another_type_of_the_first_moment_is_refused_unless_only_parameters_are_taken(
    config, replace, record
):
    other = replace(config, optimizer={"first_moment_dtype": "bfloat16"})
    says = "optimizer.first_moment_dtype was None and is bfloat16"
    with pytest.raises(InputError, match=says):
        check_identity(record, identify_run(other, {}), where="here", accept_change=True)
    check_parameters(record, other, where="here")
    earlier = {
        name: value
        for name, value in record.architecture.items()
        if name != "optimizer.first_moment_dtype"
    }
    # of a run that did not have this option
    earlier = dataclasses.replace(record, architecture=earlier)
    check_identity(earlier, identify_run(config, {}), where="here", accept_change=True)
    check_parameters(earlier, other, where="here")
    with pytest.raises(InputError, match=says):
        check_identity(earlier, identify_run(other, {}), where="here", accept_change=True)


@pytest.mark.parametrize(
    "change", [{"step": 11}, {"data": {"sequences": 88}}, {"fingerprint": {}}, {"checksum": ""}]
)
def test_a_changed_record_is_damaged(change, record):
    assert Record.from_json(record.to_json()) == record
    with pytest.raises(DamagedError, match="the record is not what was saved"):
        Record.from_json(record.to_json() | change)


def test_a_record_of_another_format_is_refused():
    with pytest.raises(
        InputError,
        match="version 1 of the format, and this code reads 2; continue it with the code",
    ):
        Record.from_json({"data": {}})


def test_the_fingerprint_has_the_names_of_the_leaves():
    assert fingerprint({"a": {"b": jnp.zeros(2)}, "c": [jnp.ones(1, jnp.uint32)]}) == {
        "a.b": 0,
        "c.0": 1,
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_the_fingerprint_does_not_depend_on_the_sharding(dtype):
    values = np.asarray(jax.random.normal(jax.random.key(0), (8, 16)) * 50).astype(dtype)
    prints = []
    for shape in ((1, 8), (2, 4), (8, 1)):
        mesh = jax.make_mesh(
            shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
        )
        prints.append(
            fingerprint(
                {"x": jax.device_put(values, jax.NamedSharding(mesh, jax.P("data", "model")))}
            )
        )
    assert prints[0] == prints[1] == prints[2]


@given(element=st.integers(0, 63), bit=st.integers(0, 31))
def test_any_flipped_bit_is_detected(element, bit):
    values = np.linspace(-3, 3, 64, dtype=np.float32)
    damaged = values.copy()
    damaged.view(np.uint32)[element] ^= np.uint32(1) << np.uint32(bit)
    assert fingerprint([jnp.asarray(values)]) != fingerprint([jnp.asarray(damaged)])
