"""Tests that imports point down, that the checking tools stand apart, and that no files import each
other.
"""

import ast
import collections
import functools
import graphlib
import pathlib
import re

import pytest

from tests.test_plain import count_of

ROOT = pathlib.Path(__file__).parent.parent

# The longest prefix counts. A module may import modules of its own layer and of lower ones.
LAYERS = {
    "flaxasync.hardware": 0,
    "flaxasync.device_order": 0,
    "flaxasync.mesh": 0,
    "flaxasync.ring": 0,
    "flaxasync.foreign_json": 0,
    "flaxasync.transport": 1,
    "flaxasync.kernels": 1,
    "flaxasync.ops": 2,
    "flaxasync.nn": 3,
    "flaxasync.verify": 5,  # the command that verifies ops on a machine
    "flaxasync": 4,  # the public names, which no module of the package imports
    "models": 6,
    "train": 7,
    "configs": 8,
}
# apart: it depends on facts about chips alone, and no layer of the package imports it
CHECK = "flaxasync.check"
CHECK_DEPENDS_ON = ("flaxasync.hardware", "flaxasync.device_order")
# The public names; the verification, which reads profiles and simulates; and the script, which
# audits what it runs.
MAY_IMPORT_CHECK = ("flaxasync", "flaxasync.verify", "train")


@functools.cache
def modules():
    """Returns {name: path} of every module of the package, the model, the script and the
    presets.
    """
    paths = [
        path
        for top in ("flaxasync", "models", "train", "configs")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    ]
    return dict(zip(names, paths, strict=True))


def layer(name):
    matches = [prefix for prefix in LAYERS if name == prefix or name.startswith(prefix + ".")]
    return LAYERS[max(matches, key=len)]


def within(name, package):
    return name == package or name.startswith(package + ".")


@functools.cache
def nodes(path):
    return tuple(ast.walk(ast.parse(path.read_text())))


def imported(path, known):
    """Returns every module of `known` that a file imports at any depth of its code.

    That includes imports inside functions, those for type checkers alone, and modules that a `from`
    import names.
    """
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in names]
        else:
            continue
        found.update(name for name in names if name in known)
    return found


def violations(name, targets):
    """Returns the imports among `targets` that the layers forbid a module of this name."""
    if within(name, CHECK):
        return sorted(t for t in targets if not within(t, CHECK) and t not in CHECK_DEPENDS_ON)
    forbidden = [t for t in targets if not within(t, CHECK) and layer(t) > layer(name)]
    if name not in MAY_IMPORT_CHECK and not any(within(name, top) for top in MAY_IMPORT_CHECK[1:]):
        forbidden += [t for t in targets if within(t, CHECK)]
    return sorted(forbidden)


def cycle(imports):
    """Returns modules that import each other, directly or around, from {module: modules that it
    imports}; or None.
    """
    try:
        list(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return None


@pytest.mark.parametrize(
    ("name", "path"), modules().items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_point_down(name, path):
    assert violations(name, imported(path, modules())) == []


def test_no_files_import_each_other():
    assert (
        cycle({name: imported(path, modules()) - {name} for name, path in modules().items()})
        is None
    )


@pytest.mark.parametrize(
    ("name", "source", "forbidden"),
    [
        ("flaxasync.ring", "from flaxasync import nn", ["flaxasync.nn"]),
        ("flaxasync.ring", "import flaxasync.transport.xla", ["flaxasync.transport.xla"]),
        (
            "flaxasync.kernels.gemm",
            "def f():\n    from flaxasync.ops import plan",
            ["flaxasync.ops.plan"],
        ),
        ("flaxasync.ops.plan", "from flaxasync.check import audit", ["flaxasync.check"]),
        ("flaxasync.nn.mlp", "import flaxasync", ["flaxasync"]),
        ("flaxasync.check.player.play", "from flaxasync.mesh import chip", ["flaxasync.mesh"]),
        ("models.transformer", "from flaxasync import check", ["flaxasync.check"]),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, name, source, forbidden):
    """Negative test: the rules notice each kind of import that they forbid."""
    file = tmp_path / "module.py"
    file.write_text(source + "\nfrom flaxasync.hardware import CHIPS\n")
    assert violations(name, imported(file, modules())) == forbidden


def test_files_that_import_each_other_are_found():
    """Negative test: a cycle is found when it is direct and when it goes around."""
    assert cycle({"a": {"b"}, "b": {"a"}, "c": {"a"}}) is not None
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def budgets():
    """Yields (folders, thousands of nodes) of each row of the table of layers in docs/design.md."""
    table = (ROOT / "docs" / "design.md").read_text().partition("| budget |")[2]
    for line in table.split("\n\n")[0].splitlines()[2:]:
        _, _, folders, _, budget, *_ = line.split("|")
        yield re.findall(r"`([\w/]+?)/?`", folders), float(budget)


@functools.cache
def nodes_of(folder):
    """Counts the nodes of a folder, or of a module of the package."""
    place = ROOT / folder if (ROOT / folder).is_dir() else ROOT / "flaxasync" / folder
    files = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    return sum(count_of(file)["nodes"] for file in files)


@pytest.mark.parametrize(("folders", "budget"), list(budgets()))
def test_a_folder_keeps_to_its_budget(folders, budget):
    assert folders
    assert sum(map(nodes_of, folders)) <= 1000 * budget


def test_no_public_class_name_stands_twice_in_a_layer():
    places = collections.defaultdict(list)
    for name, path in modules().items():
        room = CHECK if within(name, CHECK) else layer(name)
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[room, node.name].append(name)
    assert {key: names for key, names in places.items() if len(names) > 1} == {}
