"""The rows of the fault table about training data and losses. test_table.py says what a row shows."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.train.data.test_tokenizer import train_tokenizer
from tests.train.lifecycle.conftest import Workplace, after_step, fault
from tests.train.runs import contents, events_of, lines_of


def other_data(place: Workplace, change: Callable[[bytes], bytes]) -> Path:
    path = place.work.with_name("other.txt")
    text = re.search(r"path='(.*?)'", place.preset.read_text())[1]
    path.write_bytes(change(Path(text).read_bytes()))
    return path


@fault("another corpus than that of the checkpoint", "another tokenizer")
def test_changed_data(stopped, expected, text, tmp_path):
    """The data reversed, halved, and with one byte that differs; another file of a tokenizer, and only its name."""
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(tokenizer, text, vocab_size=128, special_tokens=(), all_bytes=False)
    before = contents(stopped.work)
    for change, says in (
        (lambda data: data[::-1], "source data: content_hash was "),
        (lambda data: data[: len(data) // 2], "tokens was "),
        (lambda data: data[:9000] + b"X" + data[9001:], "source data: content_hash was "),
    ):
        assert "--data.accept_change True" in stopped.fails(2, says, "--data.path", other_data(stopped, change))
        assert contents(stopped.work) == before
    for name, says in ((tokenizer, "tokenizer was bytes and is"), ("gpt2", "where data.tokenizer is a name")):
        code, _, err = stopped.run("--data.tokenizer", name)
        assert code == 2
        assert says in err
    stopped.goes_on(expected)


@fault("another corpus, accepted")
def test_accepted_data(stopped, expected):
    path = other_data(stopped, lambda data: data[::-1])
    newest = max(stopped.steps_saved())
    stopped.completes("--data.path", path, "--data.accept_change", "True")
    assert stopped.losses()[:newest] == expected[:newest]
    starts = [event for event in events_of(stopped.work) if event["event"] == "start"]
    assert any("content_hash" in change for change in starts[-1]["changes"])


@fault("missing, empty, binary or foreign data")
def test_bad_data(stopped, expected):
    path = stopped.work.with_name("bad.txt")
    stopped.fails(2, "there is no", "--data.path", path)
    for content, says in ((b"", "is empty"), (b"\0abc" * 100, "holds a zero byte"), (b"\xff" * 9000, "token ids")):
        path.write_bytes(content)
        stopped.fails(2, says, "--data.path", path)
    stopped.goes_on(expected)


@fault("data or a workdir that may not be read or written")
def test_permissions(place, expected):
    # The interpreter and its packages may be in a folder that only the first user reads.
    code = "import os as _os\nimport train.lifecycle.training\n_os.setegid(65534), _os.seteuid(65534)\n"
    place.fails(2, "Permission denied", code=code)
    place.goes_on(expected)


@fault("a data file that is cut during the run")
def test_cut_data(place, expected):
    path = other_data(place, lambda data: data)
    process = place.start("--data.path", path)
    after_step(process, 7)
    content = path.read_bytes()
    os.truncate(path, 0)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGBUS
    path.write_bytes(content)
    place.goes_on(expected, "--data.path", path)


@fault("a loss that is not finite")
def test_not_finite(stopped, expected):
    newest = max(stopped.steps_saved())
    err = stopped.fails(3, "of step ", "--optimizer.learning_rate", 1e30)
    assert f"of step {max(stopped.steps_saved())}" in err
    stopped.goes_on(expected, "--resume", newest)


@fault("a damaged batch, skipped")
def test_skipped(place):
    spoil = """
import dataclasses as _d
from train.step import trainer as _step
_inner = _step.Trainer._train_step
def _spoiled(self, state, *batch):
    import jax as _jax, jax.numpy as _jnp
    bad = _jnp.where(state.step == 11, _jnp.float32(_jnp.nan), _jnp.float32(1))
    params = _jax.tree.map(lambda leaf: leaf * bad, state.params)
    new, metrics = _inner(self, _d.replace(state, params=params), *batch)
    kept = _jax.tree.map(lambda old, leaf: _jnp.where(state.step == 11, old, leaf), state.params, new.params)
    return _d.replace(new, params=kept), metrics
_step.Trainer._train_step = _spoiled
"""
    code, out, err = place.run("--skip.nonfinite", "True", code=spoil)
    assert (code, err) == (0, ""), out + err
    assert "step 12: the update was skipped" in out
    assert [event["step"] for event in events_of(place.work) if event["event"] == "skipped"] == [12]
    lines = lines_of(place.work)
    assert [line["step"] for line in lines if line["skipped"]] == [12]
    assert np.isfinite([line["loss"] for line in lines if line["step"] != 12]).all()
