"""What every benchmark does with its table: prints it as Markdown, and writes it between the markers of a page."""

import argparse
import pathlib
from collections.abc import Sequence


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Makes the command line of a benchmark: its docstring is the help, and --write names the page of its table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="page in which the table between its markers is replaced")
    return parser


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Prints a Markdown table with aligned columns, those of numbers to the right, and returns its text."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    numeric = [all(row[i][:1].isdigit() for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)) + "|"
    table = "\n".join([line(header), rule, *map(line, rows)])
    print(table)
    return table


def write_between_markers(path: str | None, name: str, text: str) -> None:
    """Replaces the text between `<!-- name -->` and `<!-- /name -->` in a file; without a path it does nothing."""
    if path is None:
        return
    file = pathlib.Path(path)
    before, opening, rest = file.read_text().partition(f"<!-- {name} -->")
    _, closing, after = rest.partition(f"<!-- /{name} -->")
    if not opening or not closing:
        raise ValueError(f"{path} needs the markers <!-- {name} --> and <!-- /{name} -->, in this order")
    file.write_text(f"{before}{opening}\n\n{text}\n\n{closing}{after}")
