"""Which token separates documents, for the settings of well-known models: never one that ends turns
of a chat.
"""

import json

import numpy as np
import pytest

from train.data.batches import segment_ids
from train.data.end_tokens import TokenFiles, choose_separator, read_token_files
from train.lifecycle.errors import InputError

QWEN3 = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' "
    "+ m.content }}"
    "{% if m.tool %}<|eom_id|>{% else %}<|eot_id|>{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.content }}<end_of_turn>{% endfor %}"
)
MIXTRAL = (
    "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{{ m.answer + eos_token "
    "}}{% endfor %}"
)
TEXTS = {
    1: "<|im_end|>",
    2: "<|endoftext|>",
    3: "<|end_of_text|>",
    4: "<|eom_id|>",
    5: "<|eot_id|>",
    6: "<eos>",
    7: "<end_of_turn>",
    8: "</s>",
}


@pytest.mark.parametrize(("config", "generation", "eos", "template", "separator", "stops"), [
    (1, [1, 2], "<|im_end|>", QWEN3, 2, (1,)),  # Qwen 3
    (2, 2, "<|endoftext|>", QWEN3, 2, ()),  # Qwen 3 Base
    (1, None, "<|im_end|>", QWEN3, None, (1,)),  # Qwen 3, whose generation_config.json is lost
    ([3, 4, 5], [3, 4, 5], "<|eot_id|>", LLAMA3, 3, (4, 5)),  # Llama 3.1 Instruct
    (5, [3, 5], "<|eot_id|>", LLAMA3, 3, (5,)),  # Llama 3 Instruct
    (6, [6, 7], "<eos>", GEMMA, 6, (7,)),  # Gemma
    (8, 8, "</s>", MIXTRAL, None, (8,)),  # Mixtral Instruct
    (8, 8, "</s>", None, 8, ()),  # Mixtral
    ([1, 8], None, None, None, 1, (8,)),
    (None, None, None, QWEN3, None, ()),
])  # fmt: skip
def test_the_separator_ends_no_turn(config, generation, eos, template, separator, stops, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": eos, "chat_template": template})
    )
    chosen = choose_separator(read_token_files(tmp_path, vocab_size=10, texts=TEXTS))
    assert (chosen.separator, chosen.stops) == (separator, stops)
    if separator is not None and template:
        turns = np.asarray([[9, 1, 9, 5, 9, 7, 9]])  # of all these templates
        assert not segment_ids(turns, separator).any(), "every turn sees all before it"


def test_the_choice_is_said():
    files = TokenFiles((1, 2), TEXTS, {}, (QWEN3,))
    said = (
        "token 2 (<|endoftext|>) ends documents; token 1 (<|im_end|>) can end a turn of its chat "
        "template"
    )
    assert choose_separator(files).reason == said
    assert choose_separator(TokenFiles((1,), TEXTS, {}, (QWEN3,))).reason == (
        "none, as token 1 (<|im_end|>) can end a turn of its chat template; --separator TOKEN "
        "names another one"
    )
    assert (
        choose_separator(TokenFiles((2,), TEXTS, {}, ())).reason
        == "token 2 (<|endoftext|>) ends documents"
    )
    assert (
        choose_separator(TokenFiles((), TEXTS, {}, ())).reason
        == "none, as no file names a token that ends a text"
    )


def test_a_token_that_is_named_is_taken():
    files = TokenFiles((1, 2), TEXTS, {}, (QWEN3,))
    chosen = choose_separator(files, 1)
    assert (chosen.separator, chosen.stops) == (1, (2,))
    assert chosen.reason.endswith(
        "says, though the chat template uses it: no turn sees the one before it"
    )
    assert (
        choose_separator(files, 7).reason
        == "token 7 (<end_of_turn>) ends documents, as --separator says"
    )
    assert choose_separator(files, "none").separator is None
    assert choose_separator(files, "none").stops == (1, 2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", QWEN3),
        ("additional_chat_templates/tools.jinja", QWEN3),
        ("chat_template.json", json.dumps({"chat_template": QWEN3})),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "default", "template": QWEN3}]}),
        ),
        (
            "tokenizer_config.json",
            json.dumps(
                {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<|im_end|>"}}
            ),
        ),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": "{{end}}" + QWEN3, "added_tokens_decoder": {"1": {}}}),
        ),
    ],
)
def test_every_place_of_a_template_is_read(name, content, tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert choose_separator(read_token_files(tmp_path, vocab_size=10, texts=TEXTS)).separator == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"1": {"content": "<|im_end|>"}, "2": {"content": "<e>"}}},
        ),
        ("added_tokens.json", {"<|im_end|>": 1, "<e>": 2}),
    ],
)
def test_texts_are_known_without_a_tokenizer(name, content, tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "chat_template.jinja").write_text(QWEN3)
    chosen = choose_separator(read_token_files(tmp_path, vocab_size=10, texts={}))
    assert chosen.separator is None, "a token without a text may be in the template"
    (tmp_path / name).write_text(json.dumps(content))
    assert choose_separator(read_token_files(tmp_path, vocab_size=10, texts={})).separator == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "config.json",
            '{"eos_token_id": "</s>"}',
            "must be a token or a list of tokens: got '</s>'",
        ),
        (
            "config.json",
            '{"eos_token_id": [true]}',
            r"must be a token or a list of tokens: got \[True\]",
        ),
        (
            "config.json",
            '{"bos_token_id": 10}',
            "bos_token_id of .* must be a token below vocab_size=10: got 10",
        ),
        (
            "generation_config.json",
            '{"pad_token_id": 4000000000}',
            "pad_token_id of .*generation_config.json must be",
        ),
        ("generation_config.json", "[]", r"generation_config.json must be a JSON object: got \[\]"),
        ("generation_config.json", "[" * 10**5, "generation_config.json is nested too deeply"),
        ("tokenizer_config.json", "5" * 5000, "an integer has 5,000 digits"),
        ("added_tokens.json", '{"<x>": 10}', "'<x>' of .*added_tokens.json must be a token below"),
        ("added_tokens.json", '{"<x>": "1"}', "'<x>' of .*added_tokens.json must be a token below"),
        ("added_tokens.json", '{"<x>": [1]}', "'<x>' of .*added_tokens.json must be a token below"),
        ("added_tokens.json", '{"<x>": null}', "'<x>' of .*added_tokens.json must be a token"),
        (
            "tokenizer_config.json",
            json.dumps({"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}),
            "'<x>' of .*tokenizer_config.json must be a token below vocab_size=10: got 9{20}",
        ),
        ("added_tokens.json", b"\xff", "added_tokens.json is not text in UTF-8"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja must be text in UTF-8"),
    ],
)
def test_files_that_cannot_be_read_are_refused(name, content, message, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        read_token_files(tmp_path, vocab_size=10, texts={})


def test_that_there_is_no_token_for_padding_may_be_said_as_minus_one(tmp_path):
    (tmp_path / "config.json").write_text('{"pad_token_id": -1, "bos_token_id": null}')
    assert read_token_files(tmp_path, vocab_size=10, texts={}).ends == ()
