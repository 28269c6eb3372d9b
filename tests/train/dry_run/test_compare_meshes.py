"""Tests of --dry-run --compare-meshes: which meshes it ranks, what its table says of them, and that
the compiled step of the best one is as predicted.
"""

import json
import pathlib

import jax
import pytest

from benchmarks import scaling
from configs.llama_8b import llama_8b
from flaxasync import check
from flaxasync.hardware import CHIPS
from flaxasync.ops.trust import trusting
from tests.check.jaxlib_counts import counts, counts_of_jaxlib
from train.dry_run.command import compile_step
from train.dry_run.forms import rank, with_form, with_mesh
from train.run import main
from train.step.flags import flags_of
from train.step.mesh import mesh_over

TOPOLOGY = "v5e:2x2"


def options(preset, *more):
    return [str(preset("auto")), "--dry-run", "--compare-meshes", "--topology", TOPOLOGY, *more]


def test_the_table_has_predictions_and_nothing_is_compiled(preset, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(check, "compile_for")
    assert main(options(preset)) == 0
    out = capsys.readouterr().out
    assert "meshes     10 of v5e:2x2 divide the model and the batch; 10 are predicted to fit" in out
    rows = json.loads((tmp_path / "run" / "dry_run" / "meshes.json").read_text())
    assert len(rows) == 10
    assert rows[0]["seconds"] == min(row["seconds"] for row in rows)
    assert (tmp_path / "run" / "dry_run" / "meshes.txt").read_text() in out
    sizes = " ".join(f"--mesh.{name} {size}" for name, size in rows[0]["mesh"].items())
    form = f"--model.remat {rows[0]['remat']} --model.fsdp_overlap {rows[0]['overlap']}"
    assert f"best       {sizes} {form}, by prediction; a dry run with these" in out
    assert out.count("fsdp overlap") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--dry-run", "--topology", "v5e:2x2*2", "--compare-meshes"],
            "got --topology v5e:2x2*2; use v5e:2x2",
        ),
        (["--compare-meshes"], "--compare_meshes belongs to a dry run"),
    ],
)
def test_bad_options_are_refused(options, says, refuses):
    refuses(main, says, "configs/tiny.py", *options)


@pytest.mark.parametrize(("preset", "chip", "chips"), [
    ("llama_8b", "v5e", 16), ("llama_70b", "v5p", 8), ("llama_70b", "v5p", 64)
])  # fmt: skip
def test_the_table_of_the_document_is_what_the_command_makes(preset, chip, chips):
    document = (pathlib.Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in document.splitlines()
    ]
    assert scaling.predicted(preset, chip, chips) in rows


@pytest.mark.slow  # two minutes of processor time
def test_the_8b_preset_fits_16_chips_of_v5e_nearly_as_predicted_and_is_read_as_jaxlib_reads_it():
    """It is compiled for v5e, because jaxlib's parser aborts on the SparseCore gathers of programs
    for v5p.
    """
    config = with_form(llama_8b(), "layer", "xla")
    assert config.data.batch_size == 16
    assert config.data.sequence_length == 4096
    assert config.model.param_dtype == "float32"
    best = rank(config, CHIPS["v5e"], 16)[0]
    config = with_mesh(config, tuple(best.sizes.values()))
    mesh = mesh_over(check.topology_devices("v5e:4x4"), config.mesh, "v5e:4x4")
    with flags_of(config, "v5e"), jax.set_mesh(mesh), trusting("predicted"):
        _, program = compile_step(config, "v5e:4x4", mesh)
    assert program.bytes_by_kind["total"] == pytest.approx(best.needed, rel=0.15)
    assert check.timeline(program).seconds == pytest.approx(best.seconds, rel=0.15)
    text = program.as_text()
    read = check.parse(text)
    assert counts_of_jaxlib([text]) == [counts(read)]
    assert check.parse(check.format_module(read)) == read
