"""The public names of flaxasync.check: they are documented, typed, and imported only when they are used."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from flaxasync import check

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
