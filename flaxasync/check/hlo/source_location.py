"""The line of Python code that an instruction came from, from its metadata.

XLA prints the line in full (`source_file="model.py" source_line=24`), or as the number of a stack
frame, which is looked up in the tables between the HloModule line and the first computation. A
stack frame names the call that made it, its parent. An instruction that a library made (flax's
`nnx.Linear`, say) is said to come from the innermost line outside of installed packages, because
that is the line that its author can change.
"""

import re
from collections.abc import Mapping

_SOURCE_FILE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_STACK_FRAME = re.compile(r"stack_frame_id=(\d+)")
_INSTALLED = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python\d[\d.]*)[/\\]")


def source_line(metadata: str, frames: Mapping[str, str]) -> str:
    """Returns the "file:line" of an instruction by its metadata and `read_stack_frames`; "" if it
    has none.
    """
    if match := _SOURCE_FILE.search(metadata):
        return f"{match[1]}:{match[2]}"
    match = _STACK_FRAME.search(metadata)
    if match:
        return frames.get(match[1], "")
    return ""


def read_stack_frames(tables: str) -> dict[str, str]:
    """Maps the number of each stack frame to the "file:line" of its innermost caller outside of
    installed packages.

    A frame whose callers are all in installed packages is mapped to its own line. Each table has a
    line with its name, and then one line "number entry" per entry.
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
    locations = {
        n: f"{files.get(_field(text, 'file_name_id'), '?')}:{_field(text, 'line')}"
        for n, text in sections.get("FileLocations", {}).items()
        if _field(text, "line") != "0"
    }
    frames = sections.get("StackFrames", {})
    lines = {n: locations.get(_field(text, "file_location_id"), "") for n, text in frames.items()}
    parents = {n: int(_field(text, "parent_frame_id")) for n, text in frames.items()}
    # XLA prints the number of the parent plus one, and 1 where there is no parent.
    shift = 1
    if 0 in parents.values():
        shift = 0

    def line_of_user(frame: str) -> str:
        at = frame
        seen = set()
        while at in lines and at not in seen:
            if lines[at] and not _INSTALLED.search(lines[at]):
                return lines[at]
            seen.add(at)
            at = str(parents.get(at, shift) - shift)
        return lines[frame]

    return {n: line_of_user(n) for n in lines}


def _field(entry: str, name: str) -> str:
    """Returns the number of a field in an entry of a table; "0" if it has none."""
    match = re.search(rf"\b{name}=(\d{{1,9}})", entry)
    if match:
        return match[1]
    return "0"
