"""Compares the reader with jaxlib's own parser on every program of a captured run, such as a run of all tests.

    FLAXASYNC_CAPTURE=/tmp/programs make test ARGS="-p flaxasync.check tests"
    python -m tests.check.differential /tmp/programs

Both must find the same computations, instructions and groups of devices. jaxlib's parser aborts its process on some
programs that jaxlib printed, which are counted and not compared. The exit status is 1 if a program differs.
test_differential.py does the same for a part of the tests.
"""

import dataclasses
import sys
from collections.abc import Iterable

from flaxasync.check import parse, read_folder
from tests.check.jaxlib_counts import counts, counts_of_jaxlib

AT_ONCE = 50  # programs that one process of jaxlib's parser reads


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What the comparison of different programs found.

    Attributes:
      programs: How many programs there are.
      aborted: On how many of them jaxlib's parser aborts.
      differences: A line for each program in which the reader finds something else than jaxlib's parser.
    """

    programs: int
    aborted: int
    differences: tuple[str, ...]

    def __str__(self) -> str:
        counted = f"{self.programs} different programs: {len(self.differences)} differ"
        return "\n".join((*self.differences, f"{counted}, jaxlib's parser aborts on {self.aborted}"))


def compare(texts: Iterable[str]) -> Comparison:
    """Reads each program with both parsers. Programs of one text are one program."""
    texts = list(dict.fromkeys(texts))
    aborted, differences = 0, []
    for begin in range(0, len(texts), AT_ONCE):
        some = texts[begin : begin + AT_ONCE]
        for text, theirs in zip(some, counts_of_jaxlib(some), strict=True):
            if theirs is None:
                aborted += 1
            elif theirs != (ours := counts(parse(text))):
                differences.append(f"{text[:100].splitlines()[0]}: jaxlib {theirs[:2]}, the reader {ours[:2]}")
        print(f"{min(begin + AT_ONCE, len(texts))} of {len(texts)} programs", file=sys.stderr)
    return Comparison(len(texts), aborted, tuple(differences))


def main(folder: str) -> int:
    found = compare(program.as_text() for program in read_folder(folder))
    print(found)
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
