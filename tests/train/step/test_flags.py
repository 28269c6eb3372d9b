"""Tests of train/step/flags.py: which flags of libtpu a run has, and what is said of them."""

import os

import jax
import jax.numpy as jnp
import pytest

import flaxasync as fa
from flaxasync import check
from flaxasync.ops import trust
from train.checkpoints.record import identify_run
from train.dry_run import command as dry_run_module
from train.dry_run import compiled_forms
from train.dry_run.prediction import ROOM
from train.lifecycle.errors import InputError
from train.step import flags as module
from train.step.flags import (
    SCOPED,
    VARIABLE,
    WHOLE_LAYERS,
    chip_of_machine,
    flags_of,
    in_effect,
    set_flags,
)

SET = f"--{SCOPED}=98304"


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    """Starts each test without flags, and takes away those that it sets."""
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture
def on(config, replace, monkeypatch):
    """A function (chip, flags, model axis) -> the configuration of a run on a machine with such
    chips.
    """

    def on(chip, flags="auto", model=1):
        monkeypatch.setattr(module, "chip_of_machine", lambda: chip)
        return replace(
            config, mesh={"platform": "tpu", "data": 8, "model": model}, xla={"flags": flags}
        )

    return on


def test_the_flags_of_the_chip_are_set_and_named(on):
    line = set_flags(on("v6e"))
    assert os.environ[VARIABLE] == SET
    assert line == f"flags      {SCOPED}=98304 (auto, v6e); --xla.flags none turns them off"
    assert in_effect() == {SCOPED: "98304"}
    assert in_effect("cpu") == {}


@pytest.mark.parametrize(
    ("chip", "flags", "model", "line"),
    [
        ("v6e", "none", 1, "flags      none are added, by --xla.flags"),
        (
            "v6e",
            "auto",
            4,
            "flags      none (auto, v6e): none is predicted to help where mesh.model is not 1",
        ),
        ("tpu7x", "auto", 1, "flags      none (auto, tpu7x): none is predicted to help"),
        (
            None,
            "auto",
            1,
            f"flags      none: nothing here tells the kind of chip; {VARIABLE} sets some",
        ),
    ],
)
def test_where_nothing_is_known_to_help_no_flag_is_set_and_the_line_says_why(
    chip, flags, model, line, on
):
    assert set_flags(on(chip, flags, model)) == line
    assert os.environ[VARIABLE] == ""


def test_a_libtpu_that_was_not_tested_gets_none_and_the_line_says_so(on, monkeypatch):
    monkeypatch.setattr(module, "installed_libtpu", lambda: "0.0.99")
    assert set_flags(on("v6e")) == (
        f"flags      none (auto, v6e): they were not tested with this libtpu; {VARIABLE} sets some"
    )
    assert os.environ[VARIABLE] == ""


@pytest.mark.parametrize("flags", ["auto", "none"])
def test_what_the_variable_has_wins_and_stays(flags, on, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"--{SCOPED}=32768 --xla_c")
    line = set_flags(on("v6e", flags))
    assert line.startswith("flags      none are added")
    assert line.endswith(f"; {VARIABLE} has {SCOPED}=32768 xla_c=true")
    assert in_effect() == {SCOPED: "32768", "xla_c": "true"}
    assert os.environ[VARIABLE] == f"--{SCOPED}=32768 --xla_c"
    monkeypatch.setenv(VARIABLE, "--xla_c")
    set_flags(on("v6e"))
    assert os.environ[VARIABLE] == f"{SET} --xla_c"


def test_verdicts_of_a_run_count_in_a_dry_run_whenever_jax_adds_its_own_flag(on, monkeypatch):
    """JAX appends it when it is imported: after a run has set its flags, and before a dry run sets
    them.
    """
    own = " --xla_tpu_use_enhanced_launch_barrier=true"
    for there in ("", "--xla_c=1"):
        for model in (1, 4):
            monkeypatch.setenv(VARIABLE, there)
            set_flags(on("v6e", model=model))
            of_run = os.environ[VARIABLE] + own
            monkeypatch.setenv(VARIABLE, there + own)
            with flags_of(on("v6e", model=model), "v6e"):
                assert trust.Machine.here("v6e").libtpu_options == of_run


def test_a_run_that_is_not_on_tpus_sets_none_and_says_nothing(on, replace):
    config = on("v6e")
    assert set_flags(replace(config, mesh={"platform": "cpu"})) == ""
    assert os.environ[VARIABLE] == ""


def test_a_dry_run_compiles_with_the_flags_that_the_run_would_have(on, monkeypatch, capsys):
    seen = []

    def stop(*arguments):
        seen.append(os.environ[VARIABLE])
        raise InputError("stopped")

    monkeypatch.setattr(compiled_forms, "compile_step", stop)
    for model in (1, 2):
        with pytest.raises(InputError, match="stopped"):
            dry_run_module.dry_run(on(None, model=model), "v6e:2x4" if model == 1 else "v6e:4x4")
    # One program may be compiled for each of several candidate forms, all with the same flags.
    assert list(dict.fromkeys(seen)) == [SET, ""]
    assert f"flags      {SCOPED}=98304 (auto, v6e)" in capsys.readouterr().out
    assert os.environ[VARIABLE] == ""
    with flags_of(on(None), "v5p"):
        assert in_effect() == WHOLE_LAYERS["v5p"]


def test_the_chip_is_known_by_its_pci_device_and_else_by_the_type_of_the_machine(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_PCI", tmp_path)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    for slot, (vendor, device) in enumerate(
        [("0x8086", "0x006f"), ("0x1ae0", "0x0001"), ("0x1ae0", "0x0062")]
    ):
        assert chip_of_machine() is None
        (tmp_path / str(slot)).mkdir()
        (tmp_path / str(slot) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(slot) / "device").write_text(f"{device}\n")
    assert chip_of_machine() == "v5p"
    monkeypatch.setattr(module, "_PCI", tmp_path / "none")
    for kind, chip in [("v6e-8", "v6e"), ("v5litepod-16", "v5e"), ("v5p-8", "v5p"), ("v4-8", None)]:
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", kind)
        assert chip_of_machine() == chip


@pytest.mark.slow
def test_a_checkpoint_records_the_flags_and_a_resume_says_which_are_others(
    run, monkeypatch, config
):
    assert identify_run(config, {}, {"xla_a": "1"}).flags == {"xla_a": "1"}
    quiet = ("--eval.every", 0)
    monkeypatch.setattr("train.step.flags.in_effect", lambda platform: {"xla_a": "1"})
    assert "xla_a" not in run("--steps", 1, *quiet)[1]
    assert "xla_a" not in run("--steps", 2, *quiet)[1], "the same flags are no change"
    monkeypatch.setattr("train.step.flags.in_effect", lambda platform: {"xla_a": "2", "xla_b": "3"})
    code, out, _ = run("--steps", 3, *quiet)
    assert code == 0
    assert "changed    xla_a was 1 and is 2, so that sums may be rounded otherwise" in out
    assert "changed    xla_b was absent and is 3, so that sums may be rounded otherwise" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "chip"), [("v5e:2x2", "v5e"), ("v6e:2x2", "v6e"), ("v5p:2x2x1", "v5p")]
)
def test_kernels_have_their_own_limit_of_vector_memory_and_compile_beside_that_of_xla(
    topology, chip
):
    """Both ask for more than the 16 MiB of XLA's default: a fused product, and attention with its
    gradients.
    """
    mesh = check.topology_mesh(topology, (4,), ("model",))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 2048, 4096), (4096, 4096)))
    q = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)

    def step(x, w, q):
        y = fa.all_gather_matmul(x, w, "model", backend="fused")
        return y, jax.grad(lambda q: fa.attention(q, q, q, kernel="flash").sum())(q)

    heads = jax.P(None, None, "model")
    specs = (jax.P(None, "model"), jax.P(None, "model"), heads)
    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(jax.P(None, None, "model"), heads)
        )
    )
    with jax.set_mesh(mesh):
        text = check.compile_for(
            topology, step, x, w, q, compiler_options=WHOLE_LAYERS[chip]
        ).as_text()
    assert text.count("tpu_custom_call") >= 3


@pytest.fixture
def on_gpus(config, replace, monkeypatch, tmp_path):
    """A function (model of the GPU, fsdp axis, flags) -> the configuration of a run on a machine
    with such GPUs.
    """
    monkeypatch.setenv(module.XLA_VARIABLE, "")
    monkeypatch.setenv(module.MEMORY_VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(module.MEMORY_VARIABLE)
    monkeypatch.setattr(module, "_NVIDIA", tmp_path)

    def on_gpus(kind, fsdp=1, flags="auto"):
        folder = tmp_path / "0000:01:00.0"
        folder.mkdir(exist_ok=True)
        (folder / "information").write_text(f"Model: \t\t {kind}\nIRQ:   \t\t 18\n")
        return replace(
            config, mesh={"platform": "gpu", "data": 1, "fsdp": fsdp}, xla={"flags": flags}
        )

    return on_gpus


@pytest.mark.parametrize(
    ("kind", "fsdp", "wanted"),
    [
        ("NVIDIA H100 80GB HBM3", 1, {}),
        ("NVIDIA H100 80GB HBM3", 2, dict(module.WITH_FSDP)),
        ("NVIDIA A100-SXM4-80GB", 1, {module.SCHEDULER: "true"}),
    ],
)
def test_the_flags_of_gpus_are_those_of_xla(kind, fsdp, wanted, on_gpus):
    line = set_flags(on_gpus(kind, fsdp))
    assert in_effect("gpu") == wanted
    assert os.environ[VARIABLE] == ""
    if wanted:
        assert line.endswith("--xla.flags none turns them off")
    else:
        assert line == "flags      none (auto, h100): none is predicted to help here"


def test_gpus_that_are_not_known_and_a_jaxlib_that_was_not_tested_get_none(on_gpus, monkeypatch):
    line = set_flags(on_gpus("NVIDIA GeForce RTX 5090", 2))
    assert line == ("flags      none: nothing here tells the kind of chip; XLA_FLAGS sets some")
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "0.99")
    line = set_flags(on_gpus("NVIDIA A100-SXM4-80GB"))
    assert "(auto, a100): they were not tested with this jaxlib; XLA_FLAGS sets some" in line
    assert in_effect("gpu") == {}


def test_a_run_on_gpus_may_take_the_memory_that_a_dry_run_allows(on_gpus, monkeypatch):
    set_flags(on_gpus("NVIDIA GeForce RTX 5090"))
    set_flags(on_gpus("NVIDIA H200", flags="none"))
    assert module.MEMORY_VARIABLE not in os.environ
    set_flags(on_gpus("NVIDIA H200"))
    assert float(os.environ[module.MEMORY_VARIABLE]) >= ROOM
    monkeypatch.setenv(module.MEMORY_VARIABLE, "0.5")
    set_flags(on_gpus("NVIDIA H200"))
    assert os.environ[module.MEMORY_VARIABLE] == "0.5"


def test_no_flag_is_added_that_is_there_or_to_the_name_of_a_file(on_gpus, monkeypatch):
    config = on_gpus("NVIDIA A100-SXM4-80GB")
    monkeypatch.setenv(module.XLA_VARIABLE, f"--{module.SCHEDULER}=false")
    line = set_flags(config)
    assert line == (
        f"flags      none are added (auto, a100); XLA_FLAGS has {module.SCHEDULER}=false"
    )
    monkeypatch.setenv(module.XLA_VARIABLE, "flags.txt")
    line = set_flags(config)
    assert line.endswith("XLA_FLAGS names a file, to which none can be added")
    assert os.environ[module.XLA_VARIABLE] == "flags.txt"


def test_a_dry_run_for_gpus_takes_their_flags_and_what_the_variable_has_stays(on_gpus, monkeypatch):
    config = on_gpus("", 2)
    monkeypatch.setenv(module.XLA_VARIABLE, "--xla_c=1")
    with flags_of(config, "h100") as line:
        assert in_effect("gpu") == {**module.WITH_FSDP, "xla_c": "1"}
        assert line.endswith("; XLA_FLAGS has xla_c=1")
    assert os.environ[module.XLA_VARIABLE] == "--xla_c=1"
    with flags_of(on_gpus("", 2, "none"), "h100") as line:
        assert line == "flags      none are added, by --xla.flags; XLA_FLAGS has xla_c=1"
