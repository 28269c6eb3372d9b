"""Runs every block of code of docs/your_model.md, in order."""

import pathlib
import re

import jax
import pytest

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "your_model.md"


@pytest.fixture
def no_mesh_afterwards():
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)


@pytest.mark.slow
def test_every_block_of_code_runs(no_mesh_afterwards):
    names = {"__name__": "your_model"}
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 14
    for block in blocks:
        exec(compile(block, DOCUMENT.name, "exec"), names)
