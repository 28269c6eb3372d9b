"""Tests of `--mesh auto`: the mesh that a dry run or a run takes, that a run keeps it, what is
refused, and that the compiled step of the best mesh is as predicted.
"""

import dataclasses
import math
import pathlib
import re

import jax
import pytest

from benchmarks import scaling
from configs.llama_8b import llama_8b
from flaxasync import check
from flaxasync.hardware import CHIPS
from flaxasync.ops.trust import trusting
from tests.check.jaxlib_counts import counts, counts_of_jaxlib
from train.config import Config, MeshConfig
from train.config.command import as_json
from train.dry_run.auto_mesh import mesh_of_run
from train.dry_run.compiled_forms import compile_step
from train.dry_run.meshes import rank, with_mesh
from train.dry_run.prediction import with_form
from train.run import main
from train.step.flags import flags_of
from train.step.mesh import axis_sizes, mesh_over

PRESET = str(pathlib.Path(__file__).parents[3] / "configs" / "llama_8b.py")
LONG = [
    "--data.sequence_length",
    "8192",
    "--data.batch_size",
    "48",
    "--dry-run",
    "--topology",
    "v6e:4x4",
]
SHARDED = "--mesh.data 1 --mesh.fsdp 16 --mesh.context 1 --mesh.model 1"


@pytest.fixture
def printed(monkeypatch, tmp_path, capsys):
    """A function that returns what a dry run prints before it compiles."""

    def printed(*options: str) -> list[str]:
        def stop(*args, **options):
            raise RuntimeError("it stops here")

        monkeypatch.setattr(check, "compile_for", stop)
        assert main([PRESET, *LONG, "--workdir", str(tmp_path), *options]) == 2
        captured = capsys.readouterr()
        assert captured.err.endswith("could not be compiled for v6e:4x4: it stops here\n")
        return captured.out.splitlines()

    return printed


def test_a_dry_run_takes_the_mesh_that_is_predicted_to_be_the_fastest(printed):
    lines = printed("--mesh", "auto")
    (line,) = [line for line in lines if "--mesh" in line]
    assert line.startswith(f"mesh       {SHARDED} (auto: the fastest of ")
    others = [line for line in lines if line.startswith("           then data x fsdp")]
    times = [float(re.search(r": ([\d.]+) s in", line)[1]) for line in others]
    assert 2 <= len(times) <= 5
    assert times == sorted(times)
    assert any(line.startswith("flags      xla_tpu_scoped_vmem_limit_kib") for line in lines), (
        "the flags of model 1"
    )


@pytest.fixture
def machine(monkeypatch):
    """The chips of a machine, which a child process would find."""
    machine = {"platform": "tpu", "chip": "v6e", "kind": "TPU v6 lite", "devices": 16}
    monkeypatch.setattr("train.step.verify.describe", lambda setup: machine)
    return machine


@pytest.fixture
def config(tmp_path) -> Config:
    return dataclasses.replace(
        llama_8b(), workdir=str(tmp_path), mesh=MeshConfig(data=1, model=4, platform="tpu")
    )


def sizes_of(config):
    return tuple(axis_sizes(config.mesh).values())


def test_a_run_takes_the_fastest_mesh_and_keeps_it_on_as_many_chips(
    machine, config, tmp_path, capsys
):
    with trusting("predicted"):
        best = rank(config, CHIPS["v6e"], 16)[0]
    chosen = mesh_of_run(config, "predicted")
    assert sizes_of(chosen) == tuple(best.sizes.values())
    assert dataclasses.replace(chosen, mesh=config.mesh) == config
    assert "(auto: the fastest of " in capsys.readouterr().out

    before = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=4, model=4))
    assert sizes_of(before) != sizes_of(chosen)
    (tmp_path / "config.json").write_text(as_json(before))
    assert sizes_of(mesh_of_run(config, "predicted")) == (1, 4, 1, 4)
    assert f"(auto: that of {tmp_path}, which this run continues)" in capsys.readouterr().out

    machine["devices"] = 32
    assert math.prod(sizes_of(mesh_of_run(config, "predicted"))) == 32


def test_several_hosts_have_the_mesh_of_the_workdir_or_none(config, tmp_path):
    several = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, distributed=True))
    with pytest.raises(
        ValueError,
        match=r"counts the chips of one host, and mesh.distributed has several: give --mesh",
    ):
        mesh_of_run(several, "predicted")
    (tmp_path / "config.json").write_text(
        as_json(dataclasses.replace(config, mesh=MeshConfig(fsdp=8, model=2)))
    )
    assert sizes_of(mesh_of_run(several, "predicted")) == (-1, 8, 1, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--mesh.platform", "cpu"],
            "the times of TPUs alone, and this run has mesh.platform=cpu: give --mesh.data",
        ),
        (
            ["--mesh.model", "4"],
            "--mesh auto chooses all sizes of the mesh: got --mesh.model as well",
        ),
        (["--mesh.fsdp=4"], "--mesh auto chooses all sizes of the mesh: got --mesh.fsdp=4 as well"),
        (["--dry-run", "--topology", "v5e:2x2*2"], "--mesh auto must have a topology of one slice"),
        (
            ["--dry-run", "--topology", "v5e:2x2", "--data.batch_size", "3", "--model.heads", "6"],
            "no mesh of 4 devices",
        ),
    ],
)
def test_what_auto_cannot_choose_is_refused(options, says, refuses):
    refuses(main, says, PRESET, "--mesh", "auto", *options)


def test_unknown_chips_are_refused(machine, config):
    machine["chip"] = "v9"
    with pytest.raises(
        ValueError,
        match=r"the times of known TPUs alone, and here are TPU v6 lite: give --mesh.data",
    ):
        mesh_of_run(config, "predicted")


@pytest.mark.parametrize(("preset", "chip", "chips"), [
    ("llama_8b", "v5e", 16), ("llama_70b", "v5e", 256), ("llama_70b", "v5p", 8), ("llama_70b", "v5p", 64)
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
    config = with_mesh(config, best.sizes)
    mesh = mesh_over(check.topology_devices("v5e:4x4"), config.mesh, "v5e:4x4")
    with flags_of(config, "v5e"), jax.set_mesh(mesh), trusting("predicted"):
        program = compile_step(config, "v5e:4x4", mesh)
    assert program.bytes_by_kind["total"] == pytest.approx(best.needed, rel=0.15)
    assert check.timeline(program).seconds == pytest.approx(best.seconds, rel=0.15)
    text = program.as_text()
    read = check.parse(text)
    assert counts_of_jaxlib([text]) == [counts(read)]
    assert check.parse(check.format_module(read)) == read
