"""How many computations and instructions a program has, counted by jaxlib's own parser and by ours."""

import json
import subprocess
import sys

from flaxasync.check import HloModule, to_long_form

PROGRAM = """
import json, sys
from jaxlib._hlo import hlo_module_from_text
for text in json.load(sys.stdin):
    try:
        computations = hlo_module_from_text(text).computations()
        print(len(computations), sum(len(c.instructions()) for c in computations), flush=True)
    except Exception as error:
        print("refused", str(error)[:200].replace("\\n", " "), flush=True)
"""


def counts_of_jaxlib(texts: list[str]) -> list[tuple[int, int] | None]:
    """Returns (computations, instructions) of each text; None if jaxlib's parser aborts.

    It aborts its process on some texts, so it is asked in another process, again for each text after such a one.
    """
    counts: list[tuple[int, int] | None] = []
    while len(counts) < len(texts):
        rest = json.dumps(texts[len(counts) :])
        done = subprocess.run([sys.executable, "-c", PROGRAM], input=rest, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        assert not any(line.startswith("refused") for line in lines), lines
        counts += [tuple(map(int, line.split())) for line in lines]
        if done.returncode:
            counts.append(None)
    return counts


def counts(module: HloModule) -> tuple[int, int]:
    """Returns (computations, instructions) of the long form, because jaxlib's parser turns sugar into the long form."""
    long = to_long_form(module)
    return len(long.computations), instruction_count(long)


def instruction_count(module: HloModule) -> int:
    return sum(len(computation.instructions) for computation in module.computations.values())
