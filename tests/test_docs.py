"""Tests that the code in the documents runs and that their links point at existing files."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


# what the first line of a block of Python begins with that does not run by itself
FRAGMENT = "# Fragment"


def python_blocks(document):
    """Returns the blocks of Python of a page that run as pasted, one after the other, and the
    fragments.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
    fragments = [block for block in blocks if block.startswith(FRAGMENT)]
    return [block for block in blocks if block not in fragments], fragments


def on_one_device(*arguments, **options):
    """Runs Python as on a laptop: its CPU is one device, until a program says otherwise."""
    given = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))
    }
    quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles in half of the time
    environment = given | quickly | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, **options
    )


@pytest.mark.slow
def test_the_block_of_the_readme_runs_as_pasted():
    """Line by line, as an interactive Python reads it, which ends a class at an empty line."""
    (block,), _ = python_blocks(ROOT / "README.md")
    done = on_one_device("-i", input=block)
    assert done.stdout.splitlines() == ["(8, 32, 64) P('data', 'model', None)"], done.stderr
    assert "Error" not in done.stderr
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if python_blocks(d)[0]], ids=lambda path: path.name
)
def test_python_of_a_page_runs_as_pasted(document, tmp_path):
    """From the top of the page to its end. A block that needs more than the page has says that it
    is a fragment.
    """
    program = tmp_path / "page.py"
    program.write_text("\n".join(python_blocks(document)[0]))
    done = on_one_device(str(program), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if python_blocks(d)[1]], ids=lambda path: path.name
)
def test_a_fragment_is_python_and_says_what_it_needs(document):
    for fragment in python_blocks(document)[1]:
        ast.parse(fragment)
        assert re.match(r"# Fragment: .+\.\n", fragment)


def test_blocks_are_told_apart(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n\n```\ny = x\n```\n\n```python\n# Fragment: of y.\nz = y\n```\n"
    )
    assert python_blocks(page) == (["x = 1\n"], ["# Fragment: of y.\nz = y\n"])


def test_the_readme_begins_with_its_two_commands():
    block = re.search(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in block.splitlines()] == [
        "make train",
        "make test",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_examples_run(example):
    done = subprocess.run(
        [sys.executable, str(example)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
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
    """The negative test: one link of three points at no file, and one path of three does not
    exist.
    """
    links = (
        "[JAX](https://docs.jax.dev), [README](README.md#layers) and [a page](docs/no_such_page.md)"
    )
    paths = (
        "`python benchmarks/table.py --write docs/tpu.md`, `ops/plan.py` and tests/no_such_test.py"
    )
    assert broken_links(links, ROOT) == ["docs/no_such_page.md"]
    assert missing_files(paths) == ["tests/no_such_test.py"]


def missing_files(text):
    """Returns the paths of Python files in a text that are neither in the repository nor in
    flaxasync/.
    """
    named = re.findall(r"(?<![\w./])\w[\w-]*(?:/[\w-]+)*/[\w-]+\.py\b", text)
    # `runs` has what commands of the pages make
    ours = [path for path in named if not path.startswith("runs/")]
    return [
        path
        for path in ours
        if not any((base / path).exists() for base in (ROOT, ROOT / "flaxasync"))
    ]


def broken_links(text, folder):
    """Returns the relative links in a Markdown text that point at no file."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    return [target for target in targets if not (folder / target).exists()]
