"""Tests of the public names: they are complete, documented, and imported only when they are used."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import types

import pytest

import flaxasync as fa


def run(code):
    """Runs Python code in a new process and returns what it prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_importing_the_package_loads_neither_the_checking_tools_nor_matplotlib():
    loaded = run("import flaxasync, sys; print(*sys.modules)")
    assert not [name for name in loaded if name.startswith(("flaxasync.check", "matplotlib", "jax"))]


def test_using_a_layer_loads_neither_the_checking_tools_nor_matplotlib():
    loaded = run(
        "import flaxasync, sys; flaxasync.nn, flaxasync.all_gather_matmul, flaxasync.plan; print(*sys.modules)"
    )
    assert "flaxasync.nn.linear" in loaded
    assert not [name for name in loaded if name.startswith(("flaxasync.check", "matplotlib"))]


def test_every_public_name_is_there():
    for name in fa.__all__:
        assert getattr(fa, name) is not None
    assert set(fa.__all__) <= set(dir(fa))
    with pytest.raises(AttributeError, match="module 'flaxasync' has no attribute 'all_gather'"):
        fa.all_gather  # noqa: B018


def test_no_submodule_has_a_public_name():
    """Importing a submodule sets an attribute of the package, which would replace a function of the same name."""
    submodules = {module.name for module in pkgutil.iter_modules(fa.__path__)}
    assert "ring" in submodules
    cannot_be_imported = {"ring_attention"}  # a former module, which raises
    assert submodules & set(fa.__all__) - cannot_be_imported <= {"nn", "check"}


def test_the_names_for_type_checkers_are_the_public_names():
    """They are written twice in `flaxasync/__init__.py`: once as imports, once with the modules to import from."""
    imports = [line.split(" as ")[1] for line in inspect.getsource(fa).splitlines() if line.startswith("    from flax")]
    assert sorted(imports) == sorted(fa.__all__)


def test_help_lists_every_public_name_in_one_line():
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in fa.__doc__.splitlines() if line.startswith("  ")}
    layers = {f"nn.{name}" for name, value in vars(fa.nn).items() if not name.startswith("_") and not _is_module(value)}
    assert set(listed) == (set(fa.__all__) - {"nn"}) | layers
    assert all(line.endswith(".") for line in listed.values())


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert fa.__version__ == version("flaxasync")


def test_former_modules_forward_or_say_where_their_contents_are():
    from flaxasync.collective_matmul import all_gather_matmul

    assert all_gather_matmul is fa.all_gather_matmul
    with pytest.raises(ImportError, match=r"use the function flaxasync\.ring_attention, or import from flaxasync\.ops"):
        importlib.import_module("flaxasync.ring_attention")
    assert callable(fa.ring_attention)


def _is_module(value):
    return isinstance(value, types.ModuleType)
