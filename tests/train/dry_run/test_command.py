"""Tests of train/run.py --dry-run: its report on a run, on chips that are not there, and on a run
that does not fit.
"""

import contextlib
import dataclasses
import json
import re
import threading
import time
from unittest import mock

import jax
import pytest

from flaxasync import check
from flaxasync.check import progress
from flaxasync.check.compile import compile_for as compile_for_module
from flaxasync.ops.trust import VARIABLE, is_assumed
from train.config.command import load_preset, parse
from train.dry_run import command as dry_run_module
from train.dry_run.forms import MOST_COMPILED
from train.dry_run.prediction import with_form
from train.lifecycle.errors import InputError
from train.metrics.output import GIB
from train.run import main
from train.step.flags import WITH_FSDP
from train.step.products import model_flops_per_token
from train.step.trainer import Trainer

TOPOLOGY = "v5e:2x2"


@pytest.fixture(scope="module")
def compiled():
    """A list of the minuscule training step on 2 x 2 chips, once it has been compiled."""
    return []


@pytest.fixture
def options(preset):
    """The command line of a dry run of the minuscule run on 2 x 2 chips."""
    return [str(preset("auto")), "--mesh.model", "2", "--dry-run", "--topology", TOPOLOGY]


@pytest.fixture
def dry_run(options, compiled, monkeypatch, capsys):
    """A function that makes the dry run, with one compiled program for all tests, and returns what
    it prints.
    """
    compile_for = check.compile_for

    def dry_run():
        def compile_once(topology, fn, *args, **options):
            if not compiled:
                compiled.append(compile_for(topology, fn, *args, **options))
            return compiled[0]

        monkeypatch.setattr(check, "compile_for", compile_once)
        assert main(options) == 0
        return capsys.readouterr().out

    return dry_run


@pytest.mark.slow
def test_a_dry_run_reports_memory_and_estimated_speed(dry_run, tmp_path):
    out = dry_run()
    assert "4 devices of v5e:2x2, as data 2 x model 2" in out
    assert re.search(
        r"memory +fits: .* MiB per device for batch 8 x 16 tokens; 15.75 GiB are available", out
    )
    predicted = re.search(
        r" as the compiler counts it; ([\d.]+) MiB were predicted from the sizes", out
    )
    assert float(predicted[1]) > 0
    assert re.search(
        r"step +[\d.]+ us estimated: work [\d.]+%, waiting for other devices [\d.]+%", out
    )
    assert re.search(r"speed +[\d,]+ tokens/s, .* MFU [\d.]+% of 197 TFLOP/s", out)
    assert "model FLOPs:" in out
    assert "nothing was run" in out
    assert "kernels    those predicted to be fastest\n" in out
    assert re.search(r"audit +ok: \d+ transfers per step", out)

    folder = tmp_path / "run" / "dry_run"
    assert {path.name for path in folder.iterdir()} == {
        "timeline.png", "trace.json", "audit.txt", "program.txt", "report.json", "report.txt"
    }  # fmt: skip
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((folder / "report.json").read_text())
    assert figures["fits"]
    assert figures["estimated_tokens_per_second"] == pytest.approx(
        8 * 16 / figures["estimated_step_seconds"]
    )
    used = figures["bytes_by_use"]
    assert used["optimizer state"] >= 2 * used["parameters"]
    assert sum(used.values()) == figures["bytes_by_kind"]["total"]
    assert "collective-permute" in (folder / "audit.txt").read_text()
    assert not (tmp_path / "run" / "config.json").exists(), "a dry run must not start a run"


@pytest.mark.slow
@pytest.mark.optimized
def test_a_dry_run_takes_the_fastest_of_the_forms_that_it_compiles(options, capsys, tmp_path):
    """All forms of the minuscule run are predicted to be about as fast."""
    assert main([*options, "--model.gathered_mib", "0"]) == 0
    out = capsys.readouterr().out
    line = r"compared   --model.remat (\w+) --model.fsdp_overlap (\w+): ([\d.]+) us in "
    compared = {(remat, overlap): float(us) for remat, overlap, us in re.findall(line, out)}
    assert len(compared) == MOST_COMPILED
    best = min(compared, key=compared.get)
    chosen = re.search(r"chosen     --model.remat (\w+) --model.fsdp_overlap (\w+) \(the fas", out)
    assert chosen.groups() == best
    figures = json.loads((tmp_path / "run" / "dry_run" / "report.json").read_text())
    assert figures["estimated_step_seconds"] * 1e6 == pytest.approx(compared[best], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "mesh", "forms"),
    [("h100:4", "data 2 x model 2", 1), ("h100:2x4", "data 2 x fsdp 2 x model 2", 2)],
)
def test_a_dry_run_for_gpus_compares_what_fits_and_reports_as_for_tpus(
    topology, mesh, forms, preset, monkeypatch, capsys, tmp_path
):
    """On a machine without cuDNN. Heads of 64 in bfloat16 take its attention."""
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version",
        mock.Mock(side_effect=RuntimeError("cuDNN is not detected.")),
    )
    options = ["--mesh.model", "2", "--mesh.fsdp", str(forms), "--dry-run", "--topology", topology]
    options += ["--model.head_dim", "64", "--model.dtype", "bfloat16"]
    assert main([str(preset("auto")), *options]) == 0
    out = capsys.readouterr().out
    assert f"devices of {topology}, as {mesh}" in out
    assert out.count("compared   --model.remat none") == forms
    assert "; a run on GPUs has to be given these options" in out
    assert re.search(r"memory +fits: .* MiB per device .*; 79.11 GiB are available\n", out)
    assert "as the compiler counts it\n" in out
    assert re.search(r"speed +[\d,]+ tokens/s, .* MFU [\d.]+% of 989.4 TFLOP/s", out)
    assert "NVLink of 450 GB/s" in out
    figures = json.loads((tmp_path / "run" / "dry_run" / "report.json").read_text())
    assert figures["fits"]
    assert figures["bytes_predicted"] is None
    wanted = dict(WITH_FSDP)
    if forms == 1:
        wanted = {}
    assert figures["flags"] == wanted


@pytest.mark.parametrize("trusted", ["", "none"])
def test_the_kernels_are_those_predicted_or_only_those_verified(
    trusted, preset, monkeypatch, capsys
):
    def stop(*args, **options):
        raise RuntimeError(f"assumed: {is_assumed()}")

    monkeypatch.setattr(check, "compile_for", stop)
    monkeypatch.setenv(VARIABLE, trusted)
    with pytest.raises(InputError, match=f"assumed: {not trusted}"):
        dry_run_module.dry_run(load_preset(preset("auto")), "v5e:2x4")
    assert (f"kernels    those that {VARIABLE} trusts" in capsys.readouterr().out) == bool(trusted)


def test_a_step_that_does_not_fit_says_by_how_much_and_what_would(
    options, monkeypatch, capsys, tmp_path
):
    lack = check.HbmError("no room", 40 * GIB, round(15.75 * GIB))
    monkeypatch.setattr(check, "compile_for", mock.Mock(side_effect=lack))
    assert main([*options, "--model.remat", "none", "--model.fsdp_overlap", "xla"]) == 0
    out = capsys.readouterr().out
    assert "memory     does not fit: 40 GiB per device for batch 8 x 16 tokens; 15.75 GiB" in out
    assert " as the compiler counts it; " in out
    assert "           Predicted to fit into 15.75 GiB: --mesh.data" in out
    figures = json.loads((tmp_path / "run" / "dry_run" / "report.json").read_text())
    assert (figures["fits"], figures["bytes_needed"]) == (False, 40 * GIB)
    assert figures["advice"] in out
    assert (tmp_path / "run" / "dry_run" / "report.txt").read_text() in out


def test_compiling_says_for_how_long_it_has_been_under_way(options, monkeypatch, capsys):
    def compile_slowly(*args, **options):
        time.sleep(0.5)
        raise RuntimeError("it died")

    monkeypatch.setattr(check, "compile_for", compile_slowly)
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.1)
    assert main(options) == 2
    assert f"flaxasync: compiling for {TOPOLOGY}, 0 s so far\n" in capsys.readouterr().err


def test_two_forms_are_compiled_at_a_time(options, monkeypatch):
    under_way = []
    two = threading.Event()

    def compile_with_another(*args, **options):
        under_way.append(threading.get_ident())
        if len(set(under_way)) == 2:
            two.set()
        assert two.wait(60)
        raise RuntimeError("it died")

    monkeypatch.setattr(check, "compile_for", compile_with_another)
    assert main(options) == 2
    assert len(under_way) > MOST_COMPILED


def test_ctrl_c_ends_what_is_being_compiled(options, monkeypatch):
    """The real compilers are ended, and the run does not wait for them."""
    begun = []
    lend = compile_for_module.lent_process

    @contextlib.contextmanager
    def watched(*args, **kinds):
        with lend(*args, **kinds) as process:
            begun.append(process)
            yield process

    def interrupt(config, mesh, estimates):
        estimates([config, with_form(config, "layer", "xla")])
        latest = time.monotonic() + 120
        while not begun:
            assert time.monotonic() < latest, "nothing was compiled"
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_for_module, "lent_process", watched)
    monkeypatch.setattr(dry_run_module, "choose_and_say", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dry_run_module.dry_run(parse(options).config, TOPOLOGY)
    for process in begun:
        assert process.process.poll() is not None


def test_a_step_that_never_compiles_is_refused(options, monkeypatch, refuses):
    monkeypatch.setattr(check, "compile_for", mock.Mock(side_effect=RuntimeError("it died")))
    message = "the training step could not be compiled for v5e:2x2: it died"
    refuses(main, message, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dry-run"], "--dry-run and --topology go together: got only --dry-run"),
        (["--topology", TOPOLOGY], "--dry-run and --topology go together: got only --topology"),
        (["--dry-run", "--topology", "v9:2x2"], "topology must be one that libtpu describes"),
        (["--dry-run", "--topology", "h100:9"], "at most 8 GPUs a host"),
        (
            ["--dry-run", "--topology", "v5e:2x4"],
            "must multiply to the number of devices: there are 8 v5e:2x4 devices",
        ),
        (
            ["--dry-run", "--topology", TOPOLOGY, "--data.batch_size", "3"],
            "data.batch_size must be divisible by",
        ),
        (
            ["--dry-run", "--topology", TOPOLOGY, "--model.heads", "3"],
            "width must be an even multiple of heads",
        ),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(options, message, preset, refuses):
    refuses(main, message, preset("auto"), "--mesh.model", 2, *options)


def test_without_libtpu_the_error_names_the_extras_to_install(options, monkeypatch, refuses):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(main, "'tpu' or 'dev' extra", *options)


def test_model_flops_count_every_kernel_once(config, mesh):
    """A token takes 6 FLOPs for each element of a kernel, and the two products of attention over
    the sequence.
    """
    params = Trainer(config, mesh).abstract_state().params
    kernels = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if path[-1].key == "kernel"
    ]
    model = config.model
    assert not model.tie_embeddings
    length = config.data.sequence_length
    expected = 6 * sum(kernels) + 12 * model.layers * model.width * length
    assert model_flops_per_token(model, length) == expected
    tied = dataclasses.replace(model, tie_embeddings=True)
    assert model_flops_per_token(tied, length) == expected, (
        "a tied output projection is still a matmul"
    )
    mixture = dataclasses.replace(
        model, experts=8, experts_per_token=3, expert_width=model.mlp_width // 3 + 1
    )
    dense = dataclasses.replace(model, mlp_width=3 * mixture.expert_features)
    routers = 6 * model.layers * model.width * mixture.experts
    assert model_flops_per_token(mixture, length) == model_flops_per_token(dense, length) + routers
