"""The public names of flaxasync.check: documented, typed, and imported when they are used; the order of its folders.

Each folder imports only itself and what stands before it. tests/test_layering.py asserts that no two files import each
other.
"""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from flaxasync import check
from tests.test_layering import imported, modules

ROOT = pathlib.Path(check.__file__).parents[2]
# `import flaxasync` may import JAX. This package is tested alone, under a parent that imports nothing.
ALONE = f"""
import sys, types
parent = types.ModuleType("flaxasync")
parent.__path__ = [{str(ROOT / "flaxasync")!r}]
sys.modules["flaxasync"] = parent
from flaxasync import check
"""


@pytest.mark.parametrize("name", check.__all__)
def test_a_name_is_there_and_has_its_line(name):
    assert getattr(check, name) is not None
    assert name in dir(check)
    assert re.search(rf"^  {name} +\S", check.__doc__, re.MULTILINE)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match=r"module 'flaxasync\.check' has no attribute 'audits'"):
        check.audits  # noqa: B018


def test_the_table_agrees_with_the_imports_for_type_checkers():
    tree = ast.parse(pathlib.Path(check.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module.removeprefix("flaxasync.check.") for node in block.body for alias in node.names}
    assert typed == check._HOME_OF


def test_reading_a_text_imports_neither_jax_nor_matplotlib():
    program = f"""{ALONE}
text = "HloModule m, is_scheduled=true\\n\\nENTRY e {{\\n  ROOT a = f32[8] parameter(0)\\n}}"
module = check.parse(text)
assert check.audit(text).ok and check.audit(module).ok
print(check.format_module(module), check.timeline(text, "v5e"))
import flaxasync.check.player, flaxasync.check.render, flaxasync.check.__main__
print(sorted({{"jax", "numpy", "matplotlib"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


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
