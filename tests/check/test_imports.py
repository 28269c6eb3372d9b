"""No two files of flaxasync.check import each other, directly or around, and its folders have an order, too."""

import ast
import graphlib
import pathlib

import pytest

from flaxasync import check

PACKAGE = pathlib.Path(check.__file__).parent
# Each folder imports only itself and what stands before it. "" are the commands, and the files beside the folders.
ORDER = ("hlo", "estimate", "auditing", "compile", "dispatch", "trace", "player", "gate", "capturing", "")


def modules():
    """Returns the path of each module by its name, without the packages' own files."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
    return {"flaxasync.check." + ".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in paths}


def imports(source, known):
    """Returns the modules that a source imports, those within functions included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


def level(name):
    folder, _, file = name.removeprefix("flaxasync.check.").rpartition(".")
    return ORDER.index("" if file == "__main__" else folder)


def graph(changes=()):
    known = modules()
    sources = {name: path.read_text() for name, path in known.items()} | dict(changes)
    return {name: imports(source, known) for name, source in sources.items()}


def test_there_is_no_cycle():
    tuple(graphlib.TopologicalSorter(graph()).static_order())


def test_folders_import_downwards():
    assert [(a, b) for a, targets in graph().items() for b in targets if level(b) > level(a)] == []


def test_a_planted_cycle_is_found():
    """The negative test: a result that imports its own picture, as it would within a method."""
    name = "flaxasync.check.estimate.timeline"
    planted = modules()[name].read_text() + "\ndef draw():\n    from flaxasync.check.estimate import picture\n"
    with pytest.raises(graphlib.CycleError, match="nodes are in a cycle") as caught:
        tuple(graphlib.TopologicalSorter(graph({name: planted})).static_order())
    assert {name, "flaxasync.check.estimate.picture"} == {*caught.value.args[1]}


def test_a_planted_import_upwards_is_found():
    name, target = "flaxasync.check.hlo.reader", "flaxasync.check.auditing.audit"
    planted = graph({name: f"import {target}"})
    assert [(a, b) for a, targets in planted.items() for b in targets if level(b) > level(a)] == [(name, target)]
