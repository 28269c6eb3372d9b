"""Tests that the code of the package, the model and the training script is plain: one fact a statement.

docs/design.md says why. Each limit is a number for 1,000 statements, or 1,000 lines for long lines.
"""

import ast
import collections
import functools
import itertools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ROOMS = ("flaxasync", "models", "train")
LIMITS = {
    "packed assignments": 3,
    "conditional expressions": 20,
    "deep expressions": 14,
    "lambdas": 14,
    "annotations that say Any": 8,
    "long functions": 0.4,
    "lines over 100 columns": 3,
}
DEEP = 40  # nodes of a statement without those inside of it
LONG = 41  # statements of a function, with its own


def own_nodes(statement):
    """Returns the nodes of a statement, without those of the statements inside of it."""
    found = [statement]
    for node in found:  # which grows by the children of each node
        found += (c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt))
    return found


def is_packed(node):
    """Says whether a tuple is assigned to a tuple, unless the two are a swap."""
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    if not isinstance(node.value, ast.Tuple) or not isinstance(target, ast.Tuple):
        return False
    return sorted(map(ast.unparse, target.elts)) != sorted(map(ast.unparse, node.value.elts))


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def says_any(node):
    annotation = getattr(node, "annotation", None)
    names = ast.walk(annotation) if annotation is not None else ()
    return any(isinstance(name, ast.Name) and name.id == "Any" for name in names)


def count(source):
    """Counts in one file what `LIMITS` limits, its statements and its lines."""
    found = collections.Counter()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            inner = sum(isinstance(child, ast.IfExp) for child in ast.walk(node)) - 1
            found["conditional expressions"] += (
                1 + 2 * inner
            )  # one within another counts three times
        if isinstance(node, ast.FunctionDef):
            found["long functions"] += sum(isinstance(n, ast.stmt) for n in ast.walk(node)) > LONG
        found["lambdas"] += isinstance(node, ast.Lambda)
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            found["annotations that say Any"] += says_any(node)
        if isinstance(node, ast.stmt) and not is_docstring(node):
            found["statements"] += 1
            found["packed assignments"] += is_packed(node)
            size = len(own_nodes(node))
            found["nodes"] += size
            is_block = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            found["deep expressions"] += not is_block and size > DEEP
    lines = source.splitlines()
    found["lines"] = len(lines)
    found["lines over 100 columns"] = sum(len(line) > 100 for line in lines)
    return found


def files():
    return itertools.chain.from_iterable(sorted((ROOT / room).rglob("*.py")) for room in ROOMS)


@functools.cache
def count_of(path):
    return count(path.read_text())


@functools.cache
def total():
    return sum(map(count_of, files()), collections.Counter())


@pytest.mark.parametrize("what", LIMITS)
def test_the_code_is_plain(what):
    unit = "lines" if what.startswith("lines") else "statements"
    assert total()[what] * 1000 / total()[unit] <= LIMITS[what]


def test_no_format_is_skipped():
    assert [path for path in files() if "fmt: skip" in path.read_text()] == []


def test_each_kind_is_found():
    """Negative test: every limit counts what it names."""
    source = (
        "a, b = 1, 2\na, b = b, a\nx: Any = lambda: 1 if y else (2 if z else 3)\n"
        f"f({', '.join(map(str, range(50)))})\ndef g():\n{'    pass\n' * 41}"
    )
    found = count(source)
    expected = dict.fromkeys(LIMITS, 1) | {"conditional expressions": 4, "statements": 46}
    assert {what: found[what] for what in expected} == expected
