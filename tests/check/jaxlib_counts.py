"""What a program has, by jaxlib's own parser and by ours: computations, instructions, and groups of
collectives.
"""

import json
import subprocess
import sys

from flaxasync.check import HloModule
from flaxasync.check.hlo.participants import replica_groups

# Its text for fingerprints lists all devices, whatever the notation was. A computation is repeated
# where it is called.
PROGRAM = r"""
import json, re, sys
from jaxlib._hlo import HloPrintOptions, hlo_module_from_text
for text in json.load(sys.stdin):
    try:
        module = hlo_module_from_text(text)
        computations = module.computations()
        groups = re.findall(r"replica_groups=(\{(?:\{[\d,]*\},?)*\})", module.to_string(HloPrintOptions.fingerprint()))
        count = sum(len(c.instructions()) for c in computations)
        print(len(computations), count, *sorted({*groups}), flush=True)
    except Exception as error:
        print("refused", str(error)[:200].replace("\\n", " "), flush=True)
"""

# computations, instructions, and every set of groups that a collective has
type Counts = tuple[str, ...]


def counts_of_jaxlib(texts: list[str]) -> list[Counts | None]:
    """Returns the counts of each text; None if jaxlib's parser aborts.

    It aborts its process on some texts, so it is asked in another process, again for each text
    after such a one.
    """
    counts: list[Counts | None] = []
    while len(counts) < len(texts):
        rest = json.dumps(texts[len(counts) :])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], input=rest, capture_output=True, text=True, check=False
        )
        lines = done.stdout.splitlines()
        assert not any(line.startswith("refused") for line in lines), lines
        counts += [tuple(line.split()) for line in lines]
        if done.returncode:
            counts.append(None)
    return counts


def counts(module: HloModule) -> Counts:
    """Returns the counts of a module, which has the short form of asynchronous operations as
    jaxlib's parser has it.
    """
    collectives = [i for i in module.instructions if "replica_groups" in i.attributes]
    groups = [
        _lists(i.attributes["replica_groups"] != "{}" and replica_groups(i, 1)) for i in collectives
    ]
    instructions = sum(len(c.instructions) for c in module.computations.values())
    return str(len(module.computations)), str(instructions), *sorted({*groups})


def _lists(groups: tuple[tuple[int, ...], ...] | bool) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups or ()) + "}"
