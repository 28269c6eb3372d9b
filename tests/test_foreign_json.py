"""Tests of flaxasync/foreign_json.py: what JSON is read, and that everything else is one error with
the file's name.
"""

import os
import sys

import pytest

from flaxasync.foreign_json import MOST_DEPTH, JsonError, MissingJsonError, parse_json, read_json


def test_json_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "a.json"
    most = int(1e30)  # `transformers` writes it for "no limit"
    text = '{"a": [1, -2.5, "caf\u00e9 \\ud83d\\ude00"], "b": {"most": MOST}}'.replace(
        "MOST", str(most)
    )
    path.write_text(text, encoding="utf-8")
    (tmp_path / "link.json").symlink_to(path)
    for file in (path, tmp_path / "link.json"):
        assert read_json(file) == {"a": [1, -2.5, "caf\u00e9 \U0001f600"], "b": {"most": most}}


@pytest.mark.parametrize(("content", "message"), [
    (b"", "is not JSON: Expecting value"),
    (b"{", "is not JSON: Expecting property name"),
    (b'\xef\xbb\xbf{"a": 1}', "is not JSON: Unexpected UTF-8 BOM"),
    ('{"a": 1}'.encode("utf-16"), "is not text in UTF-8: byte 0 is 0xff"),
    (b'{"a": "\xe9"}', "is not text in UTF-8: byte 7 is 0xe9"),
    (b'{"a": "\\ud800"}', "has a text that is no Unicode: half of a surrogate pair"),
    (b'{"\\uDFFF": 1}', "has a text that is no Unicode: half of a surrogate pair"),
    (b"[" * 100_000, "is nested too deeply: the most is 64 arrays and objects inside each other"),
    (b"[" * 65 + b"]" * 65, "is nested too deeply"),
    (b'{"a": ' * 100_000, "is nested too deeply"),
    (b"[" + b"9" * 5000 + b"]", "is not JSON: an integer has 5,000 digits, and the most is 300"),
    (b"1" + b"0" * 400, "is not JSON: an integer has 401 digits"),
    (b" " * 1000, "cannot be read: it has more than 999 bytes"),
])  # fmt: skip
def test_what_is_no_json_is_one_error_in_one_line(content, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    most = 999 if content.isspace() else 1 << 20
    with pytest.raises(JsonError) as raised:
        read_json(path, most_bytes=most)
    assert str(raised.value).startswith(f"{path} {message}")
    assert "\n" not in str(raised.value)


def test_the_largest_depth_is_read():
    for depth in (1, MOST_DEPTH):
        value = parse_json("[" * depth + "]" * depth, "a text")
        for _ in range(depth - 1):
            (value,) = value
        assert value == []
    limit = sys.getrecursionlimit()
    with pytest.raises(JsonError, match="a text is nested too deeply"):
        parse_json("[" * (limit - 200) + "]" * (limit - 200), "a text")


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(
            JsonError, match=r"cannot be read: (it is no regular file|Is a directory)"
        ):
            read_json(place)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(JsonError, match="Too many levels of symbolic links"):
        read_json(tmp_path / "loop")
    with pytest.raises(MissingJsonError, match=f"there is no file {tmp_path / 'none'}"):
        read_json(tmp_path / "none")
