"""Tests of train/run.py --dry-run: its report on a run, on chips that are not there, and on a run that does not fit."""

import dataclasses
import json
import pathlib
import re

import jax
import pytest

from flaxasync import check
from flaxasync.ops.trust import is_assumed
from tests.check.jaxlib_counts import counts, counts_of_jaxlib
from train.config.command import load_preset
from train.dry_run import command as dry_run_module
from train.dry_run.command import GIB, topology_devices
from train.dry_run.mesh_costs import predicted_memory
from train.lifecycle.errors import InputError
from train.run import main
from train.step.mesh import make_mesh, mesh_over
from train.step.products import model_flops_per_token
from train.step.trainer import Trainer

ROOT = pathlib.Path(__file__).parents[3]
TOPOLOGY = "v5e:2x2"


@pytest.fixture(scope="module")
def program():
    """A dict that holds the minuscule training step on 2 x 2 chips once it has been compiled."""
    return {}


@pytest.fixture
def options(preset):
    """The command line of a dry run of the minuscule run on 2 x 2 chips."""
    return [str(preset("auto")), "--mesh.model", "2", "--dry-run", "--topology", TOPOLOGY]


@pytest.fixture
def compiled_once(program, monkeypatch):
    """Makes all dry runs of this module share one compiled program; returns the calls as (topology, state)."""
    calls = []
    compile_for = check.compile_for

    def compile_or_remember(topology, fn, *args, **options):
        calls.append((topology, args[0]))
        if "kept" not in program:
            program["kept"] = compile_for(topology, fn, *args, **options)
        return program["kept"]

    monkeypatch.setattr(check, "compile_for", compile_or_remember)
    return calls


def refuse(monkeypatch, count):
    """Makes the compiler refuse its first `count` programs for lack of memory."""
    compile_for, left = check.compile_for, [count]

    def refusing(*args, **options):
        program = compile_for(*args, **options)
        if left[0]:
            left[0] -= 1
            raise check.HbmError("no room", 40 * GIB, round(15.75 * GIB))
        return program

    monkeypatch.setattr(check, "compile_for", refusing)


@pytest.mark.slow
def test_a_dry_run_reports_memory_and_estimated_speed(options, compiled_once, tmp_path, capsys):
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "4 devices of v5e:2x2, as data 2 x model 2" in out
    assert re.search(r"memory +fits: .* MiB per device for batch 8 x 16 tokens; 15.75 GiB are available", out)
    assert re.search(r"step +[\d.]+ ms estimated: work [\d.]+%, waiting for other devices [\d.]+%", out)
    assert re.search(r"speed +[\d,]+ tokens/s, .* MFU [\d.]+% of 197 TFLOP/s", out)
    assert "model FLOPs:" in out
    assert "nothing was run" in out
    assert "kernels    those predicted to be fastest (--trust predicted)" in out
    assert re.search(r"audit +ok: \d+ transfers per step", out)

    folder = tmp_path / "run" / "dry_run"
    assert {path.name for path in folder.iterdir()} == {
        "timeline.png", "trace.json", "audit.txt", "program.txt", "report.json", "report.txt"
    }  # fmt: skip
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((folder / "report.json").read_text())
    assert figures["fits"]
    assert figures["estimated_tokens_per_second"] == pytest.approx(8 * 16 / figures["estimated_step_seconds"])
    used = figures["bytes_by_use"]
    assert used["optimizer state"] >= 2 * used["parameters"]
    assert sum(used.values()) == figures["bytes_by_kind"]["total"]
    assert "collective-permute" in (folder / "audit.txt").read_text()
    assert not (tmp_path / "run" / "config.json").exists(), "a dry run must not start a run"


@pytest.mark.parametrize("mode", ["predicted", "verified"])
def test_the_kernels_are_those_predicted_or_only_those_verified(mode, preset, monkeypatch):
    def stop(*arguments):
        raise InputError(f"assumed: {is_assumed()}")

    monkeypatch.setattr(dry_run_module, "_compile_what_fits", stop)
    with pytest.raises(InputError, match=f"assumed: {mode == 'predicted'}"):
        dry_run_module.dry_run(load_preset(preset("auto")), "v5e:2x4", mode)


@pytest.mark.slow
def test_the_compiled_step_is_read_as_jaxlib_reads_it(options, compiled_once, program):
    main(options)
    text = program["kept"].text
    assert counts_of_jaxlib([text]) == [counts(check.parse(text))]


@pytest.mark.slow
def test_the_step_of_the_8b_preset_for_cpu_devices_is_read_as_jaxlib_reads_it():
    """The step has all layers and options of the preset, and narrow layers, which have the same instructions.

    test_compare_meshes.py reads the step for a TPU, at its full width.
    """
    config = load_preset(ROOT / "configs" / "llama_8b.py")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=1024, width=256, mlp_width=512),
        data=dataclasses.replace(config.data, batch_size=8, sequence_length=256),
    )
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):  # flax's RMSNorm mixes bfloat16 and float32
        text = Trainer(config, mesh).compile_train_step().as_text()
    assert counts_of_jaxlib([text]) == [counts(check.parse(text))]


@pytest.mark.parametrize(
    ("refusals", "smaller"),
    [
        pytest.param(1, {"data.batch_size": 4}, marks=pytest.mark.slow),
        pytest.param(2, {"data.batch_size": 2}, marks=pytest.mark.slow),
        pytest.param(3, {"data.batch_size": 2, "model.param_dtype": "bfloat16"}, marks=pytest.mark.slow),
        (4, {"data.batch_size": 2, "model.param_dtype": "bfloat16", "model.layers": 1}),
    ],
)
def test_a_smaller_step_is_estimated_if_the_requested_one_does_not_fit(
    refusals, smaller, options, compiled_once, monkeypatch, tmp_path, capsys
):
    refuse(monkeypatch, refusals)
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "memory     does not fit: 40 GiB per device" in out
    assert "fits       with " + " ".join(f"--{name} {value}" for name, value in smaller.items()) in out
    figures = json.loads((tmp_path / "run" / "dry_run" / "report.json").read_text())
    assert (figures["fits"], figures["estimates_are_of"]) == (False, smaller)
    assert figures["bytes_needed"] == 40 * GIB
    assert figures["notes"]
    assert all(f"note: {note}\n" in out for note in figures["notes"])
    state = compiled_once[-1][1]
    assert ("bfloat16" in {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)}) == (refusals > 2)


def test_the_batch_is_chosen_by_its_predicted_memory(preset, replace):
    """On a chip with twice the memory that batch 64 needs, the largest one tried is 64, a power of two per shard."""
    config = replace(load_preset(preset("auto")), mesh={"model": 2}, data={"batch_size": 256})
    mesh = mesh_over(topology_devices(TOPOLOGY), config.mesh, TOPOLOGY)
    needed = sum(predicted_memory(replace(config, data={"batch_size": 64}), mesh.shape).values())
    chip = dataclasses.replace(check.CHIPS["v5e"], hbm_bytes=needed / dry_run_module.MEMORY_TARGET + 1)
    with jax.set_mesh(mesh):
        assert dry_run_module._smaller_batches(config, mesh, chip) == [64, 2]


def test_a_step_that_does_not_fit_with_one_layer_is_refused(options, compiled_once, monkeypatch, refuses):
    refuse(monkeypatch, 99)
    refuses(main, "not even one layer fits on v5e:2x2", *options)


def test_a_crash_of_the_compiler_is_reported(options, monkeypatch, refuses):
    def die(*args, **options):
        raise RuntimeError("the TPU compiler died of SIGSEGV")

    monkeypatch.setattr(check, "compile_for", die)
    refuses(main, "the training step could not be compiled for v5e:2x2: the TPU compiler died of SIGSEGV", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dry-run"], "--dry-run and --topology go together: got only --dry-run"),
        (["--topology", TOPOLOGY], "--dry-run and --topology go together: got only --topology"),
        (["--dry-run", "--topology", "v9:2x2"], "topology must be one that libtpu describes"),
        (["--dry-run", "--topology", "v5e:2x4"], "must multiply to the number of devices: there are 8 v5e:2x4 devices"),
        (["--dry-run", "--topology", TOPOLOGY, "--data.batch_size", "3"], "data.batch_size must be divisible by"),
        (["--dry-run", "--topology", TOPOLOGY, "--model.heads", "3"], "width must be an even multiple of heads"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(options, message, preset, refuses):
    refuses(main, message, preset("auto"), "--mesh.model", 2, *options)


def test_without_libtpu_the_error_names_the_extras_to_install(options, monkeypatch, refuses):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(main, "'tpu' or 'dev' extra", *options)


def test_model_flops_count_every_kernel_once(config, mesh):
    """A token takes 6 FLOPs for each element of a kernel, and the two products of attention over the sequence."""
    params = Trainer(config, mesh).abstract_state().params
    kernels = [leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "kernel"]
    model = config.model
    assert not model.tie_embeddings
    length = config.data.sequence_length
    expected = 6 * sum(kernels) + 12 * model.layers * model.width * length
    assert model_flops_per_token(model, length) == expected
    tied = dataclasses.replace(model, tie_embeddings=True)
    assert model_flops_per_token(tied, length) == expected, "a tied output projection is still a matmul"
