"""Tests of the presets in configs/: the document names each of them, with its size."""

import re
from pathlib import Path

import pytest

from train.config.command import load_preset

ROOT = Path(__file__).resolve().parents[3]
PRESETS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.name != "__init__.py")


def rows():
    """Returns the table of presets of docs/train.md: (model, devices) by the file of a preset."""
    found = re.findall(
        r"^\| `(configs/\w+\.py)` \| (.*?) \| (.*) \|$",
        (ROOT / "docs" / "train.md").read_text(),
        re.M,
    )
    return {name: (model, devices) for name, model, devices in found}


def test_the_table_of_the_document_has_every_preset():
    assert sorted(rows()) == [f"configs/{path.name}" for path in PRESETS]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_table_has_the_sizes_of_the_preset(path):
    config = load_preset(path)
    model, devices = rows()[f"configs/{path.name}"]
    assert f"{config.model.layers} layer" in model
    assert f"width {config.model.width}" in model
    assert (f"{config.model.experts} experts" in model) == bool(config.model.experts)
    vocabulary = (
        "bytes" if config.model.vocab_size == 256 else f"{config.model.vocab_size:,} tokens"
    )
    assert vocabulary in model
    if config.mesh.platform == "cpu" and config.mesh.context == 1:
        assert (
            f"{config.mesh.cpu_devices} simulated CPU devices, {config.mesh.data} x "
            f"{config.mesh.model}" in devices
        )
