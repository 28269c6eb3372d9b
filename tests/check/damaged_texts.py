"""Programs that were damaged line by line so that most of them can still be read; and what
`fa.check` makes of them.

`python -m tests.check.damaged_texts FIRST STOP` tries the texts of these numbers, with 2 GiB of
memory. It prints how many of them were read, and fails if one raises anything but ValueError, or
takes more than 20 s of processor time.
"""

import contextlib
import random
import re
import resource
import sys
import time

from flaxasync.check import audit, format_module, parse, timeline
from tests.check.hlo_texts import EXAMPLES, KERNELS, LOOP, STEP, TWO_SENDS, WIDE_SUM, WRONG

MEMORY = 2 << 30
SECONDS = 20
TEXTS = (KERNELS, LOOP, STEP, TWO_SENDS, WIDE_SUM, *EXAMPLES.values(), *WRONG.values())
_NUMBERS = ("0", "1", "2", "3", "7", "16", "100", "4096", "65536", "999999999", "-1", "9" * 30)
_SHAPES = (
    "f32[]",
    "s32[]",
    "pred[]",
    "token[]",
    "opaque[]",
    "()",
    "(f32[64], s32[])",
    "((f32[64]), f32[32], s32[])",
    "f32[64]",
    "b(f32[64]{0})",
    "bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}",
    "s32[]{:S(2)}",
    "f32[<=8,?]",
    "c128[3]",
    "s4[7]{0:E(4)}",
)
_OPCODES = (
    "add",
    "negate",
    "copy",
    "dot",
    "convolution",
    "tuple",
    "get-tuple-element",
    "while",
    "conditional",
    "call",
    "fusion",
    "custom-call",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "bitcast",
    "infeed",
    "outfeed",
    "after-all",
    "send",
    "send-done",
    "recv",
    "recv-done",
    "copy-start",
    "copy-done",
    "async-start",
    "async-update",
    "async-done",
    "call-start",
    "call-done",
    "custom-call-start",
    "custom-call-done",
    "slice-start",
    "all-gather-start",
    "all-gather-done",
    "collective-permute-start",
    "collective-permute-done",
    "dynamic-slice",
    "dynamic-update-slice",
    "optimization-barrier",
    "parameter",
    "constant",
    "sort",
    "scatter",
    "reduce",
    "compare",
)
_ATTRIBUTES = (
    "replica_groups={}",
    "replica_groups=[2,4]<=[8]",
    "replica_groups=mesh['x'=2,'y'=4] {'y'}",
    "channel_id=1",
    "source_target_pairs={{0,1},{1,0}}",
    "source_target_pairs={{0,70000}}",
    "index=5",
    "dimensions={0}",
    "direction=GT",
    "lhs_contracting_dims={3}",
    "dim_labels=bf01_01io->bf01",
    "output_to_operand_aliasing={{0}: (5, {2})}",
    'custom_call_target="tpu_custom_call"',
    'custom_call_target="AsyncCollectiveStart"',
    'custom_call_target="control_dep"',
    'async_execution_thread="host"',
    'backend_config={"window_config":{"estimated_cycles":"99999999999"}}',
    'backend_config={"known_trip_count":{"n":"999999999999"}}',
    'backend_config="a string"',
    "is_host_transfer=true",
    'metadata={op_name="a{\\"b" source_file="f.py" source_line=3}',
    "sharding={devices=[2,1]<=[2]}",
    'origin={{"a"}}',
)


def damaged(number: int) -> str:
    """Returns the text of a number: one of the programs above, in which a few places were
    changed.
    """
    chance = random.Random(number)
    text = chance.choice(TEXTS)
    for _ in range(chance.randint(1, 8)):
        text = chance.choice(_WAYS)(text, chance)
    return text


def _replace(text: str, chance: random.Random, pattern: str, others: list[str]) -> str:
    """Replaces one match of a pattern, outside of the first line, by one of the others."""
    found = [match for match in re.finditer(pattern, text) if match.start() > text.find("\n")]
    if not found or not others:
        return text
    match = chance.choice(found)
    return text[: match.start()] + chance.choice(others) + text[match.end() :]


def _number(text: str, chance: random.Random) -> str:
    return _replace(text, chance, r"(?<![\w%.])\d+", list(_NUMBERS))


def _shape(text: str, chance: random.Random) -> str:
    return _replace(text, chance, r"\w+\[[\d,]*\](\{[\d,]*(:[^{}]*)?\})?", list(_SHAPES))


def _opcode(text: str, chance: random.Random) -> str:
    return _replace(text, chance, r"(?<= )[a-z][a-z\-]+(?=\([%)])", list(_OPCODES))


def _operand(text: str, chance: random.Random) -> str:
    return _replace(text, chance, r"(?<=[(, ])%[\w.\-]+(?=[,)])", re.findall(r"%[\w.\-]+", text))


def _called(text: str, chance: random.Random) -> str:
    return _replace(
        text, chance, r"(?<==)%[\w.\-]+(?=[,\n])", re.findall(r"^%[\w.\-]+", text, re.MULTILINE)
    )


def _attribute(text: str, chance: random.Random) -> str:
    return _replace(text, chance, r"(?<=\))\n", [f", {attribute}\n" for attribute in _ATTRIBUTES])


def _header(text: str, chance: random.Random) -> str:
    fields = (
        "num_partitions=8",
        "replica_count=4",
        "num_partitions=999999999",
        "replica_count=0",
        "is_scheduled=false",
    )
    line, _, rest = text.partition("\n")
    return f"{line}, {chance.choice(fields)}\n{rest}"


def _line(text: str, chance: random.Random) -> str:
    """Drops, repeats or moves one line."""
    lines = text.splitlines(keepends=True)
    at = chance.randrange(1, len(lines))
    line = lines.pop(at)
    if chance.random() < 0.6:
        lines.insert(at, line)
        lines.insert(
            chance.randrange(1, len(lines)),
            line.replace("ROOT ", "").replace(" = ", f".{at} = ", 1),
        )
    return "".join(lines)


_WAYS = (_number, _shape, _opcode, _operand, _called, _attribute, _header, _line)


def check(text: str) -> bool:
    """Reads, writes, audits and times a text. Returns whether it could be read."""
    try:
        module = parse(text)
    except ValueError:
        return False
    assert parse(format_module(module)) == module
    assert parse(format_module(module, form="short")) == module
    for made in (audit, lambda read: timeline(read, "v5e")):
        with contextlib.suppress(ValueError):
            str(made(module))
    return True


def main(first: int, stop: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    read = 0
    for number in range(first, stop):
        before = time.process_time()
        try:
            read += check(damaged(number))
        except BaseException:
            print(f"text {number}:\n{damaged(number)}", file=sys.stderr)
            raise
        assert time.process_time() - before < SECONDS, (
            f"text {number} took too long:\n{damaged(number)}"
        )
    print(read)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
