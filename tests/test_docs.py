"""Tests that the code in the documents runs and that their links point at existing files."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape
    assert names["y"].sharding.spec == names["x"].sharding.spec


def test_the_readme_begins_with_its_two_commands():
    block = re.search(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in block.splitlines()] == ["make train", "make test"]


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example):
    done = subprocess.run(
        [sys.executable, str(example)], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_point_at_existing_files(document):
    text = document.read_text()
    assert broken_links(text, document.parent) == []
    if document.name != "CHANGELOG.md":  # which also names files of earlier versions
        assert missing_files(text) == []


def test_a_missing_file_is_found():
    """The negative test: one link of three points at no file, and one path of three does not exist."""
    links = "[JAX](https://docs.jax.dev), [README](README.md#layers) and [a page](docs/no_such_page.md)"
    paths = "`python benchmarks/table.py --write docs/tpu.md`, `ops/plan.py` and tests/no_such_test.py"
    assert broken_links(links, ROOT) == ["docs/no_such_page.md"]
    assert missing_files(paths) == ["tests/no_such_test.py"]


def missing_files(text):
    """Returns the paths of Python files in a text that are neither in the repository nor in flaxasync/."""
    named = re.findall(r"(?<![\w./])\w[\w-]*(?:/[\w-]+)*/[\w-]+\.py\b", text)
    ours = [path for path in named if not path.startswith("runs/")]  # `runs` has what commands of the pages make
    return [path for path in ours if not any((base / path).exists() for base in (ROOT, ROOT / "flaxasync"))]


def broken_links(text, folder):
    """Returns the relative links in a Markdown text that point at no file."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    return [target for target in targets if not (folder / target).exists()]
