"""Reads a module from a file, with a message for each kind of file that is not the text of one compiled program."""

import os
import sys

from flaxasync.check.hlo.error import HloError
from flaxasync.check.hlo.module import HloModule
from flaxasync.check.hlo.reader import parse

_AS_TEXT = "write it as text: XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text', or compiled.as_text()"


def read_text(path: str | os.PathLike) -> str:
    """Returns the text of a file, or of standard input for "-".

    Raises:
      HloError: The file is not text.
      OSError: The file cannot be read.
    """
    try:
        if path == "-":
            text = sys.stdin.read()
        else:
            with open(path, "rb") as file:  # not pathlib, whose import takes longer than reading most files
                text = file.read().decode()
        text = text.removeprefix("\ufeff")  # the mark that some editors put before text
    except UnicodeDecodeError as error:
        begin = error.object[:4]
        if begin == b"ML\xefR":
            what = "a lowered program (StableHLO bytecode), not the text of a compiled one"
        else:
            what = "a gzip file" if begin[:2] == b"\x1f\x8b" else "no text, perhaps a protobuf"
        raise HloError(f"this is {what}: {_AS_TEXT}") from None
    if "\0" in text[:4096]:
        raise HloError(f"this is no text, perhaps a protobuf: {_AS_TEXT}")
    return text


def read_module(path: str | os.PathLike) -> HloModule:
    """Reads a module from a file, or from standard input for "-".

    Raises:
      HloError: The file is not the text of one compiled program.
      OSError: The file cannot be read.
    """
    return parse(read_text(path))
