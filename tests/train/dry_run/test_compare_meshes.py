"""Tests of --dry-run --compare-meshes: which meshes it ranks, and what its table says of those that
it compiles.
"""

import dataclasses
import json
import pathlib
from unittest import mock

import pytest

from benchmarks import scaling
from configs.llama_8b import llama_8b
from flaxasync import check
from flaxasync.hardware import CHIPS
from tests.check.jaxlib_counts import counts, counts_of_jaxlib
from train.dry_run import compare_meshes as module
from train.dry_run.forms import rank, with_form
from train.run import main

TOPOLOGY = "v5e:2x2"


def options(preset, *more):
    return [str(preset("auto")), "--dry-run", "--compare-meshes", "--topology", TOPOLOGY, *more]


def test_without_compiling_the_table_has_predictions_only(preset, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(check, "compile_for")
    assert main(options(preset, "--compiled-meshes", "0")) == 0
    out = capsys.readouterr().out
    assert "meshes     10 of v5e:2x2 divide the model and the batch; 10 are predicted to fit" in out
    rows = json.loads((tmp_path / "run" / "dry_run" / "meshes.json").read_text())
    assert len(rows) == 10
    assert {row["source"] for row in rows} == {"predicted"}
    assert rows[0]["seconds"] == min(row["seconds"] for row in rows)
    assert (tmp_path / "run" / "dry_run" / "meshes.txt").read_text() in out
    sizes = " ".join(f"--mesh.{name} {size}" for name, size in rows[0]["mesh"].items())
    form = f"--model.remat {rows[0]['remat']} --model.fsdp_overlap {rows[0]['overlap']}"
    assert f"best       {sizes} {form}, by figures that are predicted" in out
    assert out.count("fsdp overlap") == 1


def test_refused_and_crashed_meshes_are_replaced_and_stand_below_those_that_compiled(
    preset, tmp_path, capsys, monkeypatch
):
    crash, unserved = RuntimeError("the compiler crashed"), NotImplementedError("no such kernel")
    # errors, or seconds
    outcomes = [check.HbmError("no room", 40 << 30, 16 << 30), crash, unserved, 3.0, 2.0]
    real, tried = module.compiled_form, []

    def compile_one(config, topology, prediction, trust):
        outcome = outcomes[len(tried)]
        tried.append(tuple(prediction.sizes.values()))
        if isinstance(outcome, Exception):
            monkeypatch.setattr(check, "compile_for", mock.Mock(side_effect=outcome))
            return real(config, topology, prediction, trust)
        return dataclasses.replace(
            prediction, work=outcome, waits={"nothing": 0.0}, source=module.COMPILED
        )

    monkeypatch.setattr(module, "compiled_form", compile_one)
    assert main(options(preset, "--compiled-meshes", "2")) == 0
    rows = json.loads((tmp_path / "run" / "dry_run" / "meshes.json").read_text())
    assert len(set(tried)) == 5
    out = capsys.readouterr().out
    assert "not compiled: backend=auto cannot serve this run: no such kernel" in out
    assert "does not fit: it needs 40 GiB" in out
    assert "not compiled: the compiler crashed" in out
    assert "compiling  2 of 2" in out
    assert "40 GiB (too much)" in out
    by_mesh = [tuple(row["mesh"].values()) for row in rows]
    assert len(set(by_mesh)) == len(rows) == 10
    assert (by_mesh[0], by_mesh[1], by_mesh[-1]) == (tried[4], tried[3], tried[0])
    assert set(by_mesh[-3:-1]) == set(tried[1:3])
    assert [row["source"] for row in rows] == ["compiled"] * 2 + ["predicted"] * 5 + [
        module.FAILED
    ] * 2 + ["compiled"]
    assert (rows[-1]["memory"], rows[-1]["fits"], rows[-1]["seconds"]) == (40 << 30, False, None)


def test_meshes_that_are_predicted_not_to_fit_replace_none(config, monkeypatch, replace):
    large = replace(config, model={"width": 4096, "mlp_width": 16384, "layers": 12})
    ranked = [one for one in rank(large, CHIPS["v5e"], 8) if not one.fits]
    tried = []

    def refuse(config, topology, prediction, trust):
        tried.append(prediction)
        return dataclasses.replace(prediction, source=module.COMPILED)

    monkeypatch.setattr(module, "compiled_form", refuse)
    assert len(ranked) > 1
    module._compile_best(large, "v5e:2x4", ranked, "predicted", 1)
    assert tried == ranked[:1]


def test_a_compiler_that_crashes_on_every_mesh_ends_the_comparison_with_code_2(
    preset, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        check, "compile_for", mock.Mock(side_effect=RuntimeError("the compiler crashed"))
    )
    assert main(options(preset, "--compiled-meshes", "1")) == 2
    assert "no step could be compiled for v5e:2x2, on 4 meshes" in capsys.readouterr().err
    rows = json.loads((tmp_path / "run" / "dry_run" / "meshes.json").read_text())
    assert [row["source"] for row in rows] == ["predicted"] * 6 + [module.FAILED] * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--dry-run", "--topology", "v5e:2x2*2", "--compare-meshes"],
            "got --topology v5e:2x2*2; use v5e:2x2",
        ),
        (["--compare-meshes"], "--compare_meshes belongs to a dry run"),
        (
            ["--dry-run", "--topology", TOPOLOGY, "--compiled-meshes", "-1"],
            "--compiled_meshes must be at least 0: got",
        ),
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
def test_the_8b_preset_fits_16_chips_of_v5e_nearly_as_predicted_and_is_read_as_jaxlib_reads_it(
    monkeypatch,
):
    """It is compiled for v5e, because jaxlib's parser aborts on the SparseCore gathers of programs
    for v5p.
    """
    compile_for, programs = check.compile_for, []

    def keep(*args, **options):
        programs.append(compile_for(*args, **options))
        return programs[-1]

    monkeypatch.setattr(check, "compile_for", keep)
    config = with_form(llama_8b(), "layer", "xla")
    assert config.data.batch_size == 16
    assert config.data.sequence_length == 4096
    assert config.model.param_dtype == "float32"
    best = rank(config, CHIPS["v5e"], 16)[0]
    row = module.compiled_form(config, "v5e:4x4", best, "predicted")
    assert row.source == "compiled"
    assert row.fits
    assert row.needed == pytest.approx(best.needed, rel=0.15)
    assert row.seconds == pytest.approx(best.seconds, rel=0.15)
    text = programs[-1].as_text()
    read = check.parse(text)
    assert counts_of_jaxlib([text]) == [counts(read)]
    assert check.parse(check.format_module(read)) == read
