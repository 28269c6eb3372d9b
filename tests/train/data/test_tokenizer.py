"""Tests of train/data/tokenizer.py: tokens of text files, their documents, and bad files."""

import json
import os

import filelock
import numpy as np
import pytest
import tokenizers

from train.config import DataConfig
from train.data import tokenizer as module
from train.data.corpus import open_corpora
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_errors import errors_of_tokenizers
from train.lifecycle.errors import InputError

END = 1


@pytest.fixture
def tokenizer(tmp_path, text):
    """The file of a small byte-pair tokenizer of 300 tokens, of which END ends documents."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, text)
    return path


def train_tokenizer(
    path, text, *, vocab_size=300, special_tokens=("<pad>", "<end>"), all_bytes=True
):
    """Writes a byte-level tokenizer, of all bytes or of those of the text."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if all_bytes else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train([str(text)], trainer)
    inner.save(str(path))


def opened(location, tokenizer, **fields):
    config = DataConfig(path=str(location), tokenizer=str(tokenizer), separator=END, **fields)
    return open_corpora(config, vocab_size=300)["data"]


def test_a_folder_of_text_becomes_documents_once(tokenizer, tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    documents = ["the quick brown fox\n", "caf\u00e9 \u2713 \U0001f600", "lazy dog " * 100]
    for i, document in enumerate(documents):
        (folder / f"{i}.txt").write_text(document, encoding="utf-8")
    corpus = opened(folder, tokenizer)
    assert "tokenized 100%" in capsys.readouterr().out
    ends = np.flatnonzero(corpus.tokens == END)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.dtype == np.uint32
    assert [
        corpus.tokenizer.decode(part) for part in np.split(corpus.tokens, ends + 1)[:-1]
    ] == documents
    again = opened(folder, tokenizer)
    assert capsys.readouterr().out == "", "the tokens are there"
    assert again.tokens.filename == corpus.tokens.filename
    (folder / "0.txt").write_text("other")
    assert opened(folder, tokenizer).tokens.filename != corpus.tokens.filename


def test_each_line_of_a_jsonl_file_is_a_document(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two\nlines")))
    corpus = opened(path, tokenizer)
    assert np.count_nonzero(corpus.tokens == END) == 2


def test_a_long_document_is_encoded_in_pieces(tokenizer, text, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 500)
    corpus = opened(text, tokenizer)
    assert np.count_nonzero(corpus.tokens == END) == 1
    assert corpus.tokenizer.decode(corpus.tokens[:-1]) == text.read_text()


def test_truncation_and_padding_of_the_file_change_nothing(tokenizer, text):
    plain = opened(text, tokenizer).tokens
    inner = tokenizers.Tokenizer.from_file(str(tokenizer))
    inner.enable_truncation(8)
    inner.enable_padding(length=64)
    inner.save(str(tokenizer))
    assert len(inner.encode(text.read_text()).ids) == 64
    corpus = opened(text, tokenizer)
    np.testing.assert_array_equal(corpus.tokens, plain)
    assert corpus.tokenizer.encode(text.read_text()) == plain[:-1].tolist()


def test_documents_and_prompts_begin_with_the_same_tokens(tokenizer, text, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 500)
    inner = tokenizers.Tokenizer.from_file(str(tokenizer))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<pad> $A <end>", special_tokens=[("<pad>", 0), ("<end>", END)]
    )
    inner.save(str(tokenizer))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    corpus = opened(tmp_path / "a.jsonl", tokenizer)
    one, two = (corpus.tokenizer.encode(text) for text in ("one", "two"))
    assert one[0] == 0
    assert one[-1] != END, "a prompt is continued, so it does not end"
    assert corpus.tokens.tolist() == [*one, END, *two, END]
    assert np.count_nonzero(opened(text, tokenizer).tokens == 0) == 1, "pieces of one document"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "data must be text in UTF-8: .*a.txt"),
        (
            "a.jsonl",
            b'{"body": "one"}\n',
            'an object with "text", a string: .*a.jsonl, line 1: KeyError',
        ),
        (
            "a.jsonl",
            b'{"text": "one"}\n{"text": null}\n',
            "a.jsonl, line 2: TypeError: the text is None",
        ),
    ],
)
def test_a_bad_file_leaves_no_tokens(name, content, message, tokenizer, tmp_path, monkeypatch):
    # the tokens of the first line are written before the second is read
    monkeypatch.setattr(module, "BATCH_PIECES", 1)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        opened(tmp_path / name, tokenizer)
    assert [file.suffix for file in (tmp_path / "tokens").iterdir()] == [".lock"]


def test_a_file_of_tokens_is_used_as_it_is(tokenizer, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(20, dtype=np.uint16))
    corpus = opened(tmp_path / "a.npy", tokenizer)
    assert corpus.tokens.tolist() == list(range(20))
    assert corpus.tokenizer is not None


def test_a_tokenizer_that_does_not_match_the_vocabulary_is_refused(tokenizer, tmp_path):
    largest = max(tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab().values())
    Tokenizer.open(tokenizer, vocab_size=largest + 1)
    with pytest.raises(
        InputError,
        match=rf"tokens up to {largest}, and model.vocab_size is {largest}; .* {largest + 1}",
    ):
        Tokenizer.open(tokenizer, vocab_size=largest)
    with pytest.raises(
        InputError, match=r"must be a file of a tokenizer: \S+none.json: No such file or directory$"
    ):
        Tokenizer.open(tmp_path / "none.json", vocab_size=300)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"bad.json cannot be read"):
        Tokenizer.open(tmp_path / "bad.json", vocab_size=300)


def change(path, **parts):
    """Changes parts of a tokenizer's file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


def template(*tokens, ids=None, text=True):
    """Returns a post-processor that puts tokens before, or instead of, the text."""
    single = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    single += [{"Sequence": {"id": "A", "type_id": 0}}] if text else []
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special = {
        token: {"id": token, "ids": [ids], "tokens": [token]} for token in tokens if ids is not None
    }
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def test_a_text_that_has_the_first_and_the_last_token_itself_gets_no_second(tokenizer, tmp_path):
    """As texts have that a chat template has written: it begins them, and ends every turn."""
    change(tokenizer, post_processor=template("<pad>", ids=0))
    path = tmp_path / "a.jsonl"
    texts = ["one", "<pad>one", "<pad>one<end>", "one<end>two<end>", "<pad><pad>one", ""]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = opened(path, tokenizer)
    one, two = (
        corpus.tokenizer.inner.encode(text, add_special_tokens=False).ids for text in ("one", "two")
    )
    documents = [[0, *one, END]] * 3 + [[0, *one, END, *two, END], [0, 0, *one, END], [0, END]]
    assert corpus.tokens.tolist() == [token for document in documents for token in document]
    for text in ("one", "<pad>one"):
        assert corpus.tokenizer.encode(text) == [0, *one]


def test_several_first_tokens_are_completed(tokenizer):
    change(
        tokenizer,
        post_processor=template("<pad>", "<end>")
        | {
            "special_tokens": {
                name: {"id": name, "ids": [number], "tokens": [name]}
                for number, name in enumerate(("<pad>", "<end>"))
            }
        },
    )
    opened = Tokenizer.open(tokenizer, vocab_size=300)
    assert opened.prefix == (0, END)
    one = opened.inner.encode("one", add_special_tokens=False).ids
    for text in ("one", "<end>one", "<pad><end>one"):
        assert opened.encode(text) == [0, END, *one]
    assert opened.encode("<pad>one") == [0, END, 0, *one]


def test_the_tokens_that_end_a_text_do_not_begin_it_where_the_tokenizer_drops_letters(tmp_path):
    """Without tokens for "a", which tells both apart elsewhere, the last one counted as one of the
    first.
    """
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={"<s>": 0, "</s>": 1, "7": 2}, merges=[])
    )
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    inner.save(str(tmp_path / "a.json"))
    assert Tokenizer.open(tmp_path / "a.json", vocab_size=3).encode("7") == [0, 2]


def test_a_first_token_beyond_the_vocabulary_is_refused(tokenizer):
    for token in (300, 4_000_000_000):
        change(tokenizer, post_processor=template("<x>", ids=token))
        with pytest.raises(
            InputError, match=rf"has tokens up to {token}, and model.vocab_size is 300"
        ):
            Tokenizer.open(tokenizer, vocab_size=300)


WORDS = {"type": "WordLevel", "vocab": {"7": 0}, "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"post_processor": template("<x>")}, "no entry found for key"),  # a panic
        # a panic
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "Cannot parse precompiled_charsmap",
        ),
        (
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
            "Oniguruma error",
        ),
        (
            {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}},
            "UnkIdNotInVocabulary",
        ),
        (
            {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
            "it has no token for any text",
        ),
        ({"model": 5}, "did not match any variant"),
    ],
)
def test_what_the_package_raises_is_a_mistake_of_the_file(parts, message, tokenizer, capfd):
    change(tokenizer, **parts)
    with pytest.raises(
        InputError, match=rf"must be a file of a tokenizer: {tokenizer} cannot be read: .*{message}"
    ):
        Tokenizer.open(tokenizer, vocab_size=300)
    assert capfd.readouterr() == ("", ""), "what Rust writes is no message of a command"


def test_a_text_that_the_tokenizer_has_no_token_for_is_a_mistake_of_the_input(
    tokenizer, tmp_path, capfd
):
    change(tokenizer, model=WORDS, added_tokens=[], pre_tokenizer=None)
    with pytest.raises(
        InputError, match=rf"{tokenizer} cannot encode the text: .*Missing \[UNK\] token"
    ):
        Tokenizer.open(tokenizer, vocab_size=300).encode("8")
    (tmp_path / "a.txt").write_text("8")
    with pytest.raises(
        InputError,
        match=rf"{tokenizer} cannot encode {tmp_path / 'a.txt'} or what follows it: .*UNK",
    ):
        opened(tmp_path / "a.txt", tokenizer)
    with pytest.raises(InputError, match="cannot encode the text: TextInputSequence must be str"):
        Tokenizer.open(tokenizer, vocab_size=300).encode("\ud800")
    assert capfd.readouterr() == ("", "")


def test_what_is_written_to_standard_error_meanwhile_is_not_lost(capfd):
    with errors_of_tokenizers("it"):
        os.write(2, b"said\n")
    assert capfd.readouterr().err == "said\n"
    with pytest.raises(KeyboardInterrupt), errors_of_tokenizers("it"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "\\ud800"}', "a.jsonl, line 2, has a text that is no Unicode"),
        (b'{"text": "\xff"}', "a.jsonl, line 2, is not text in UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "a.jsonl, line 2, is nested too deeply"),
        (
            b'{"text": ' + b"9" * 5000 + b"}",
            "a.jsonl, line 2, is not JSON: an integer has 5,000 digits",
        ),
    ],
)
def test_a_line_that_is_no_json_is_named(line, message, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' + line + b"\n")
    with pytest.raises(
        InputError, match=rf"every line of a .jsonl file must be JSON: \S+{message}"
    ):
        opened(tmp_path / "a.jsonl", tokenizer)


def test_a_pipe_is_no_tokenizer(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"a.json: it is no regular file$"):
        Tokenizer.open(tmp_path / "a.json", vocab_size=300)


def test_what_a_killed_process_left_of_other_tokens_is_removed(tokenizer, text, tmp_path):
    left, held = tmp_path / "tokens" / "left.tmp", tmp_path / "tokens" / "held.tmp"
    left.parent.mkdir()
    left.touch()
    held.touch()
    with filelock.FileLock(held.with_suffix(".lock")):
        opened(text, tokenizer)
    assert [file.name for file in left.parent.glob("*.tmp")] == ["held.tmp"]
