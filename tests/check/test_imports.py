"""The folders of flaxasync.check have an order, in which each imports only itself and what stands before it.

tests/test_layering.py asserts that no two files import each other.
"""

from tests.test_layering import imported, modules

# "" are the commands, and the files beside the folders.
ORDER = ("hlo", "estimate", "auditing", "compile", "dispatch", "trace", "player", "gate", "capturing", "")


def level(name):
    folder, _, file = name.removeprefix("flaxasync.check.").rpartition(".")
    return ORDER.index("" if file == "__main__" else folder)


def upward(imports):
    """Returns the imports of files in folders that stand later, from {module: modules that it imports}."""
    return [(a, b) for a, targets in imports.items() for b in targets if level(b) > level(a)]


def test_folders_import_downwards():
    files = {name: path for name, path in modules().items() if path.name != "__init__.py"}
    checked = {name: path for name, path in files.items() if name.startswith("flaxasync.check.")}
    assert upward({name: imported(path, modules()) & checked.keys() for name, path in checked.items()}) == []


def test_a_planted_import_upwards_is_found():
    name, target = "flaxasync.check.hlo.reader", "flaxasync.check.auditing.audit"
    assert upward({name: {target}}) == [(name, target)]
