"""The house's floors: imports point down only, and flaxasync.check stands apart, on the chip table alone."""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# Longest match wins. A module may import from its own floor and from lower ones.
FLOORS = {
    "flaxasync.hardware": 0,
    "flaxasync.ring": 0,
    "flaxasync.mesh": 0,
    "flaxasync.transport": 1,
    "flaxasync.kernels": 1,
    "flaxasync": 2,
    "flaxasync.nn": 3,
    "models": 4,
    "train": 5,
    "configs": 6,
}
CHECK = "flaxasync.check"
TABLE = "flaxasync.hardware"  # data-sheet figures, which check and plan must not each have their own of


@functools.cache
def modules():
    """{name: path} of every module of the house."""
    paths = [path for top in ("flaxasync", "models", "train", "configs") for path in sorted((ROOT / top).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths, strict=True))


def floor(name):
    matches = [prefix for prefix in FLOORS if name == prefix or name.startswith(prefix + ".")]
    return FLOORS[max(matches, key=len)] if matches else None


def in_check(name):
    return name == CHECK or name.startswith(CHECK + ".")


def imported(name, path):
    """Every module of the house that a file imports, submodules named in `from` imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [full if full in modules() else node.module for full in found]
        else:
            continue
        yield from (module for module in found if floor(module) is not None)


def violations(name, targets):
    """What of `targets` a module may not import."""
    if name == "flaxasync":  # the public face: names from every floor, and nothing but names
        return []
    if in_check(name):
        return [target for target in targets if not in_check(target) and target != TABLE]
    return [target for target in targets if not in_check(target) and floor(target) > floor(name)]


@pytest.mark.parametrize(("name", "path"), modules().items(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_down(name, path):
    assert violations(name, list(imported(name, path))) == []


def test_an_import_that_points_up_is_seen(tmp_path):
    """The check's twin: it notices what it is there for."""
    source = tmp_path / "ring.py"
    source.write_text("from flaxasync import nn\nimport flaxasync.transport.xla\nfrom flaxasync.ring import shifts\n")
    targets = list(imported("flaxasync.ring", source))
    assert violations("flaxasync.ring", targets) == ["flaxasync.nn", "flaxasync.transport.xla"]
    assert violations("flaxasync.check.hlo", ["flaxasync.ring", "flaxasync.hardware"]) == ["flaxasync.ring"]


def test_the_public_face_holds_names_alone():
    tree = ast.parse((ROOT / "flaxasync/__init__.py").read_text())
    docstring, *rest = tree.body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in rest)
