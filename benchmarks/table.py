"""What every benchmark does with its table: prints it as Markdown, and writes it between the
markers of a page.
"""

import argparse
import pathlib
from collections.abc import Callable, Sequence


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Makes the command line of a benchmark: its docstring is the help, and --write names the page
    of its table.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", metavar="FILE", help="page in which the table between its markers is replaced"
    )
    return parser


def write_rows[T](
    description: str | None,
    name: str,
    header: Sequence[str],
    cases: Sequence[T],
    row: Callable[[T, pathlib.Path], Sequence[str]],
) -> None:
    """Makes the row of each case and writes the table. Rows are given a folder in which is kept what
    was compiled or simulated.
    """
    parser = command_line(description)
    parser.add_argument(
        "--programs",
        type=pathlib.Path,
        required=True,
        metavar="DIR",
        help="folder of what was compiled or simulated",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only rows whose description has this text"
    )
    chosen = parser.parse_args()
    if chosen.only and chosen.write:
        parser.error("--only makes a part of the table, which --write would replace: leave one out")
    rows = []
    for case in cases:
        if chosen.only in str(case):
            rows.append(row(case, chosen.programs))
            print(*rows[-1], flush=True)
    write_between_markers(chosen.write, name, print_table(header, rows))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Prints a Markdown table with aligned columns, those of numbers to the right, and returns its
    text.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    numeric = [all(row[i][:1].isdigit() for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = (
        "|"
        + "|".join(
            "-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)
        )
        + "|"
    )
    table = "\n".join([line(header), rule, *map(line, rows)])
    print(table)
    return table


def without_repeats(rows: Sequence[Sequence[str]], columns: int = 1) -> list[Sequence[str]]:
    """Returns the rows, with empty cells in the first columns where they are those of the row
    above.
    """
    found: list[Sequence[str]] = []
    above: Sequence[str] = ()
    for row in rows:
        first = row[:columns]
        if first == above:
            found.append((*[""] * columns, *row[columns:]))
        else:
            found.append(row)
        above = first
    return found


def write_between_markers(path: str | None, name: str, text: str) -> None:
    """Replaces the text between `<!-- name -->` and `<!-- /name -->` in a file; without a path it
    does nothing.
    """
    if path is None:
        return
    file = pathlib.Path(path)
    before, opening, rest = file.read_text().partition(f"<!-- {name} -->")
    _, closing, after = rest.partition(f"<!-- /{name} -->")
    if not opening or not closing:
        raise ValueError(
            f"{path} needs the markers <!-- {name} --> and <!-- /{name} -->, in this order"
        )
    file.write_text(f"{before}{opening}\n\n{text}\n\n{closing}{after}")
