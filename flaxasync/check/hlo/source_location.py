"""Where an instruction comes from: the name of its JAX operation, and its line of Python code.

XLA prints both as metadata of the instruction. The name is printed in full. The line is printed either in full
(`source_file="model.py" source_line=24`) or as the number of a stack frame, which is looked up in the tables between
the HloModule line and the first computation.
"""

import re
from collections.abc import Mapping

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SOURCE_FILE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_STACK_FRAME = re.compile(r"stack_frame_id=(\d+)")


def op_name(metadata: str) -> str:
    """Returns the path that JAX gave the operation, like "jit(step)/shard_map/mul"; "" if there is none."""
    match = _OP_NAME.search(metadata)
    return match[1] if match else ""


def source_line(metadata: str, frames: Mapping[str, str]) -> str:
    """Returns "file:line" of the Python that made the instruction; "" if the text does not say.

    Args:
      metadata: The instruction's metadata attribute.
      frames: What `read_stack_frames` found in the module's tables.
    """
    if match := _SOURCE_FILE.search(metadata):
        return f"{match[1]}:{match[2]}"
    match = _STACK_FRAME.search(metadata)
    return frames.get(match[1], "") if match else ""


def read_stack_frames(tables: str) -> dict[str, str]:
    """Maps the number of each stack frame to "file:line".

    Args:
      tables: The text of the tables FileNames, FunctionNames, FileLocations and StackFrames. Each has a line with its
        name, and then one line "number entry" per entry.
    """
    sections: dict[str, dict[str, str]] = {}
    entries: dict[str, str] = {}
    for line in tables.splitlines():
        number, _, rest = line.strip().partition(" ")
        if number.isdigit():
            entries[number] = rest
        elif number:
            entries = sections.setdefault(number, {})
    files = {n: text.strip('"') for n, text in sections.get("FileNames", {}).items()}
    locations = {}
    for n, text in sections.get("FileLocations", {}).items():
        if match := re.search(r"file_name_id=(\d+).*?\bline=(\d+)", text):
            locations[n] = f"{files.get(match[1], '?')}:{match[2]}"
    frames = {}
    for n, text in sections.get("StackFrames", {}).items():
        if match := re.search(r"file_location_id=(\d+)", text):
            frames[n] = locations.get(match[1], "")
    return frames
