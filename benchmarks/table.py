"""Tables of the benchmarks, which are printed as Markdown and written between markers of a document."""

import pathlib
from collections.abc import Sequence


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


def write_between_markers(path: str, name: str, text: str) -> None:
    """Replaces the text between `<!-- name -->` and `<!-- /name -->` in a file.

    Raises:
      ValueError: The file has no such pair of markers.
    """
    file = pathlib.Path(path)
    before, opening, rest = file.read_text().partition(f"<!-- {name} -->")
    _, closing, after = rest.partition(f"<!-- /{name} -->")
    if not opening or not closing:
        raise ValueError(f"{path} needs the markers <!-- {name} --> and <!-- /{name} -->, in this order")
    file.write_text(f"{before}{opening}\n\n{text}\n\n{closing}{after}")
