"""Tests of train/data/tokenizer.py: tokens of text files, their documents, and bad files."""

import json

import numpy as np
import pytest
import tokenizers

from train.config import DataConfig
from train.data import tokenizer as module
from train.data.corpus import open_corpora
from train.data.tokenizer import Tokenizer
from train.lifecycle.errors import InputError

END = 1


@pytest.fixture
def tokenizer(tmp_path, text):
    """The file of a small byte-pair tokenizer of 300 tokens, of which END ends documents."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(path, text)
    return path


def train_tokenizer(path, text, *, vocab_size=300, special_tokens=("<pad>", "<end>"), all_bytes=True):
    """Writes a byte-level tokenizer, of all bytes or of those of the text."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if all_bytes else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
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
    assert [corpus.tokenizer.decode(part) for part in np.split(corpus.tokens, ends + 1)[:-1]] == documents
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


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.txt", b"caf\xe9", "data must be text in UTF-8: .*a.txt"),
    ("a.jsonl", b'{"body": "one"}\n', 'an object with "text", a string: .*a.jsonl, line 1: KeyError'),
    ("a.jsonl", b'{"text": "one"}\n{"text": null}\n', "a.jsonl, line 2: TypeError: the text is None"),
])  # fmt: skip
def test_a_bad_file_leaves_no_tokens(name, content, message, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_PIECES", 1)  # the tokens of the first line are written before the second is read
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
        InputError, match=rf"tokens up to {largest}, and model.vocab_size is {largest}; .* {largest + 1}"
    ):
        Tokenizer.open(tokenizer, vocab_size=largest)
    with pytest.raises(InputError, match=r"must be a file of a tokenizer: \S+none.json: No such file or directory$"):
        Tokenizer.open(tmp_path / "none.json", vocab_size=300)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"bad.json cannot be read"):
        Tokenizer.open(tmp_path / "bad.json", vocab_size=300)
