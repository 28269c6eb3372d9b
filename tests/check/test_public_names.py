"""The public names of flaxasync.check: documented, typed, and imported when they are used; the
order of its folders.
"""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from flaxasync import check
from tests.check.hlo_texts import STEP
from tests.test_layering import imported, modules


@pytest.mark.parametrize("name", check.__all__)
def test_a_name_is_there_and_has_its_line(name):
    assert getattr(check, name) is not None
    assert name in dir(check)
    assert re.search(rf"^  {name} +\S", check.__doc__, re.MULTILINE)


def test_a_name_that_does_not_exist():
    with pytest.raises(
        AttributeError, match=r"module 'flaxasync\.check' has no attribute 'audits'"
    ):
        check.audits  # noqa: B018


def test_the_table_agrees_with_the_imports_for_type_checkers():
    tree = ast.parse(pathlib.Path(check.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        alias.name: node.module.removeprefix("flaxasync.check.")
        for node in block.body
        for alias in node.names
    }
    assert typed == check._HOME_OF


ALONE = """
import sys
for layer in ("ops", "nn", "kernels", "transport", "verify", "mesh"):
    sys.modules[f"flaxasync.{layer}"] = None  # an import of it raises ModuleNotFoundError
import flaxasync as fa
text = sys.stdin.read()
module = fa.check.parse(text)
report, timeline = fa.check.audit(module), fa.check.timeline(text, "v5e")
summary = fa.check.summarize(text, axes={"data": 2, "model": 4})
assert fa.check.compare(summary, summary).ok
print(report.module, len(report.pairs), timeline.seconds > 0, fa.check.parse(fa.check.format_module(module)) == module)
import flaxasync.check.player, flaxasync.check.render, flaxasync.check.__main__
print({"jax", "numpy", "matplotlib"} & sys.modules.keys())
for name in fa.check.__all__:
    getattr(fa.check, name)
loaded = {name for name, module in sys.modules.items() if module is not None}
print(sorted(name for name in loaded if name.startswith("flaxasync.") and ".check" not in name))
try:
    fa.nn.ParallelMLP
except ImportError:
    print("no layers")
"""


def test_reading_a_text_needs_no_layer_and_imports_neither_jax_nor_matplotlib():
    done = subprocess.run([sys.executable, "-c", ALONE], input=STEP, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "jit_step 1 True True",
        "set()",
        "['flaxasync.device_order', 'flaxasync.hardware']",
        "no layers",
    ], done.stderr


# A folder imports only itself and what stands before it. "" are the commands, and the files beside
# the folders.
ORDER = (
    "hlo",
    "estimate",
    "auditing",
    "compile",
    "dispatch",
    "trace",
    "player",
    "gate",
    "",
)


# files beside the folders that import nothing, for all of them
SHARED = ("progress", "tested_libtpu", "units")


def level(name):
    folder, _, file = name.removeprefix("flaxasync.check.").rpartition(".")
    if not folder and file in SHARED:
        return -1
    return ORDER.index("" if file == "__main__" else folder)


def upward(imports):
    """Returns the imports of files in folders that stand later, from {module: modules that it
    imports}.
    """
    return [(a, b) for a, targets in imports.items() for b in targets if level(b) > level(a)]


def test_folders_import_downwards():
    files = {name: path for name, path in modules().items() if path.name != "__init__.py"}
    checked = {name: path for name, path in files.items() if name.startswith("flaxasync.check.")}
    assert (
        upward({name: imported(path, modules()) & checked.keys() for name, path in checked.items()})
        == []
    )
    # Negative test: a planted import upwards is found.
    name, target = "flaxasync.check.hlo.reader", "flaxasync.check.auditing.audit"
    assert upward({name: {target}}) == [(name, target)]
