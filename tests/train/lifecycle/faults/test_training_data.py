"""The rows of the fault table about training data and losses. test_table.py says what a row
shows.
"""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.train.data.test_tokenizer import train_tokenizer
from tests.train.lifecycle.conftest import Workplace, after_step, error_of, fault
from tests.train.runs import contents, events_of, lines_of


def other_data(place: Workplace, change: Callable[[bytes], bytes]) -> Path:
    path = place.work.with_name("other.txt")
    text = re.search(r"path='(.*?)'", place.preset.read_text())[1]
    path.write_bytes(change(Path(text).read_bytes()))
    return path


@fault("another corpus than that of the checkpoint", "another tokenizer")
def test_changed_data(stopped, refused, expected, text, tmp_path):
    """The data reversed, halved, and with one byte that differs; another file of a tokenizer, and
    only its name.
    """
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(tokenizer, text, vocab_size=128, special_tokens=(), all_bytes=False)
    before = contents(stopped.work)
    for change, says in (
        (lambda data: data[::-1], "source data: content_hash was "),
        (lambda data: data[: len(data) // 2], "tokens was "),
        (lambda data: data[:9000] + b"X" + data[9001:], "source data: content_hash was "),
    ):
        said = refused(says, "--data.path", other_data(stopped, change))
        assert "--data.accept_change True" in said
        assert contents(stopped.work) == before
    for name, says in (
        (tokenizer, "tokenizer was bytes and is"),
        ("gpt2", "where data.tokenizer is a name"),
    ):
        refused(says, "--data.tokenizer", name)
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
def test_bad_data(stopped, refused, expected):
    path = stopped.work.with_name("bad.txt")
    refused("there is no", "--data.path", path)
    for content, says in (
        (b"", "is empty"),
        (b"\0abc" * 100, "holds a zero byte"),
        (b"\xff" * 9000, "token ids"),
    ):
        path.write_bytes(content)
        refused(says, "--data.path", path)
    stopped.goes_on(expected)


@fault("data or a workdir that may not be read or written")
def test_permissions(place, expected):
    # The interpreter and its packages may be in a folder that only the first user reads.
    code = (
        "import os as _os\nimport train.lifecycle.training\n_os.setegid(65534), "
        "_os.seteuid(65534)\n"
    )
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


@fault("a data file that is written in place during the run")
def test_rewritten_data(place, expected):
    """By tokens of the vocabulary and by others; nothing that was computed from them is saved."""
    text = re.search(r"path='(.*?)'", place.preset.read_text())[1]
    right = np.frombuffer(Path(text).read_bytes(), np.uint8).astype(np.uint16)
    path = place.work.with_name("tokens.bin")
    right.tofile(path)
    before = path.stat()
    for step, wrong in ((7, right[::-1]), (12, np.full_like(right, 60_000))):
        process = place.start("--data.path", path, "--data.token_dtype", "uint16")
        after_step(process, step)
        with open(path, "r+b") as file:
            file.write(wrong.tobytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        err = error_of(process, 2)
        assert re.fullmatch(
            rf"error: data.path: {path} must stay as it is while a run reads it: .*\n", err
        ), err
        assert "saved" not in err.replace("nothing was saved since", "")
        right.tofile(path)
    place.goes_on(expected, "--data.path", path)


@fault(
    "a damaged file of tokens that a text became", "a text that is edited, and its time set back"
)
def test_token_cache(place, text, tmp_path):
    """A quarter of the tokens is left; then a letter of the text is another one."""
    copy, tokenizer = tmp_path / "copy.txt", tmp_path / "tokenizer.json"
    copy.write_bytes(text.read_bytes())
    train_tokenizer(tokenizer, text, vocab_size=128, special_tokens=(), all_bytes=False)
    options = ("--data.path", copy, "--data.tokenizer", tokenizer)
    process = place.start(*options)
    after_step(process, 16)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    (tokens,) = (tmp_path / "tokens").glob("*.bin")
    os.truncate(tokens, tokens.stat().st_size // 16 * 4)
    before = copy.stat()
    copy.write_bytes(text.read_bytes().replace(b"quick", b"quack"))
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    place.fails(2, "source data: content_hash was ", *options)
    copy.write_bytes(text.read_bytes())
    assert (
        place.completes(*options)
        == f"warning: {tokens} was not the file of tokens that had been written; it was made "
        "again\n"
    )
    again = place.beside("again")
    assert again.completes(*options) == ""
    assert place.losses() == again.losses()


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
