"""Tests of train/sample.py: the text that is shown, and the command lines that are refused."""

import dataclasses
import json

import pytest
import tokenizers
from tokenizers import decoders

from tests.train.data.test_tokenizer import train_tokenizer
from train.sample import main, stream


def decode(tokens):
    return bytes(tokens).decode(errors="replace")


def test_a_character_is_shown_when_it_is_whole():
    first, second = "caf\u00e9".encode()[:4], "caf\u00e9".encode()[4:]
    shown = list(stream(decode, list(b"> "), iter([list(first), list(second), list(b"!")]), ()))
    assert shown[:4] == ["> ", "caf", "\u00e9", "!"]
    assert "".join(stream(decode, [], iter([list(first)]), ())) == "caf\ufffd", (
        "what stays incomplete is shown at last"
    )


def bytes_tokenizer():
    """Returns a tokenizer as that of Llama 2: spaces are part of tokens, and unknown characters are
    bytes.
    """
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "\u2581": 256,
        "a": 257,
        "b": 258,
    }
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_no_text_is_lost_when_the_decoder_rewrites_earlier_text():
    """The first bytes of a character, after another one, turn both into replacement characters if
    "b" follows.
    """
    tokenizer = bytes_tokenizer()
    tokens = [*tokenizer.encode("a \u00e9").ids, *"\u20ac".encode()[:2]]
    assert tokenizer.decode(tokens[:-2]) == "a \u00e9"
    assert not tokenizer.decode([*tokens, 258]).startswith("a \u00e9"), (
        "otherwise the test shows nothing"
    )
    parts = [[token] for token in [*tokens, *tokenizer.encode("b a").ids]]
    assert (
        "".join(stream(tokenizer.decode, [], iter(parts), ())) == "a \u00e9" + 4 * "\ufffd" + " b a"
    )
    whole = tokenizer.encode("a \u00e9\u20ac b").ids
    shown = list(stream(tokenizer.decode, whole[:1], iter([[token] for token in whole[1:]]), ()))
    assert "".join(shown) == "a \u00e9\u20ac b"


def test_the_text_ends_at_the_token_that_ends_documents():
    for end in (0, 1):
        parts = iter([list(b"ab"), [*b"c", end, *b"d"], list(b"e")])
        assert "".join(stream(decode, list(b"> "), parts, {0, 1})) == "> abc"
        assert list(parts) == [list(b"e")], "nothing more is drawn"


@pytest.mark.parametrize("end", [[], [99]])
def test_no_rewritten_text_is_lost_at_the_token_that_ends_documents(end):
    """The second token changes text that was shown, and leaves its length as it was, as bytes of a
    character may.
    """
    texts = {(): "", (1,): "a\u00e9", (1, 2): "ab", (1, 2, 3): "abc"}
    for parts, shown in (([[1], [2, *end]], "a\u00e9b"), ([[1], [2], [3], end], "a\u00e9bc")):
        assert "".join(stream(lambda tokens: texts[tuple(tokens)], [], iter(parts), {99})) == shown


@pytest.fixture
def workdir(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give the text to continue, with --prompt or with --prompt_file"),
        (["--prompt", "a", "--prompt_file", "b"], "give the text to continue"),
        (["--prompt_file", "/none"], "--prompt_file must be text in UTF-8"),
        (["--prompt", ""], "the prompt must have 1 token or more: got none"),
        (["--prompt", "caf\udce9"], r"--prompt must be text in UTF-8: got b'caf\xe9'"),
        (["--prompt", "a", "--top_p", "0"], "--top_p must be above 0 and at most 1: got 0.0"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature must be at least 0"),
        (["--prompt", "a", "--max_tokens", "0"], "--max_tokens must be at least 1"),
        (["--prompt", "a"], "must be the workdir of a run"),
    ],
)
def test_a_bad_command_line_is_refused(workdir, options, message, refuses):
    refuses(main, message, workdir, *options)


def test_a_mesh_that_cannot_hold_the_model_is_refused(workdir, config, replace, refuses):
    config = replace(config, model={"mlp_width": 36})
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    says = "mlp_width must be divisible by the 'model' axis: got mlp_width=36 on 8 devices"
    refuses(main, says, workdir, "--prompt", "a", "--mesh.data", 1, "--mesh.model", 8)


def test_tokens_without_a_tokenizer_cannot_be_sampled_from_text(
    workdir, config, replace, refuses, text
):
    config, tokenizer = replace(config, data={"tokenizer": "gpt2"}), workdir / "tokenizer.json"
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    refuses(main, "tokens of gpt2, and nothing says how", workdir, "--prompt", "a")
    train_tokenizer(tokenizer, text)
    refuses(
        main,
        "the tokenizer must match the vocabulary",
        workdir,
        "--prompt",
        "a",
        "--tokenizer",
        tokenizer,
    )


def test_a_folder_that_is_no_workdir_is_refused(tmp_path, refuses):
    refuses(main, "WORKDIR must be the folder of a run or of an import", tmp_path, "--prompt", "a")
    refuses(main, "WORKDIR must come first", "--prompt", "a")
