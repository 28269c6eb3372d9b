"""Capturing the programs of a training script that was not written for it, in the process and from
outside.
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import (
    HLO_ONLY,
    audit,
    capture,
    compile_for,
    overview,
    parse,
    read_folder,
    topology_mesh,
)
from flaxasync.check.__main__ import main
from flaxasync.check.capturing import recorder
from flaxasync.check.capturing.recorder import EVENT
from tests.check.capturing import training

ROOT = pathlib.Path(__file__).parents[3]
BOTH_STEPS = {"jit_train_step", "jit_eval_step"}


def compile_one(size):
    jax.jit(lambda x: x * 2.0).lower(jax.ShapeDtypeStruct((size,), jnp.float32)).compile()


def sizes(programs):
    return [program.argument_shapes[0].dimensions[0] for program in programs]


@pytest.mark.slow
def test_every_module_of_a_training_script_for_two_percent_of_the_compile_time(
    monkeypatch, tmp_path
):
    """The time is that of this thread, and the least of three, because other work on the machine
    lengthens it.
    """
    record, shares = recorder._compiled, []

    def watched(event, seconds, **facts):
        began = time.thread_time()
        record(event, seconds, **facts)
        capturing.append(time.thread_time() - began)
        if event == EVENT:  # of a function that JAX has compiled
            compiling.append(seconds)
            names.append(
                "".join(c if c.isalnum() or c in "_.-" else "_" for c in facts["fun_name"]).rstrip(
                    "_"
                )
            )

    monkeypatch.setattr(recorder, "_compiled", watched)
    for n in range(3):
        names, compiling, capturing = [], [], []
        folder = tmp_path / str(n)
        jax.clear_caches()
        with capture(folder) as programs, jax.numpy_dtype_promotion("standard"):
            training.train(steps=1)
        shares.append(sum(capturing) / sum(compiling))
    assert 0 < min(shares) < 0.02
    assert [p.name.rstrip("_") for p in programs] == names
    assert {p.name for p in programs} >= BOTH_STEPS
    (step,) = (p for p in programs if p.name == "jit_train_step")
    assert parse(step.as_text()).is_scheduled
    assert audit(step, chip="v5e").ok
    assert step.memory["argument_size_in_bytes"] > 0
    assert 0 < step.seconds < 60
    assert (step.platform, step.chip, step.devices) == ("cpu", None, 1)
    assert any(shape.dimensions == (8, 8, 8, 1) for shape in step.argument_shapes)
    assert read_folder(folder) == programs
    view = str(overview(programs))
    assert f"{len(programs)} programs, compiled in" in view
    assert "no transfer is exposed" in view


def test_nothing_is_recorded_outside_of_the_block():
    compile_one(2)
    with capture() as outer:
        compile_one(3)
        with capture() as inner:
            compile_one(4)
    compile_one(5)
    assert sizes(outer) == [3, 4]
    assert inner == outer[1:]


def test_programs_of_several_threads():
    """Each comes once, although several are new when JAX says that the first of them is
    compiled.
    """
    with capture() as programs, concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(compile_one, range(3, 11)))
    assert sorted(sizes(programs)) == list(range(3, 11))


def test_captures_that_share_a_folder(tmp_path, monkeypatch):
    """Each keeps its texts: one after the other, one in the other, and with the PID and the host of
    another process.
    """
    captured = []
    for size in (3, 5):
        with capture(tmp_path) as outer:
            compile_one(size)
            with capture(tmp_path) as inner:
                compile_one(size + 10)
        captured += [*outer, *inner]
    # The first process of a container has the same PID and numbers its programs from 0.
    monkeypatch.setattr(recorder, "_numbers", iter(range(100)))
    captured.append(recorder.write_program(tmp_path, captured[0]))
    assert sizes(captured) == [3, 13, 13, 5, 15, 15, 3]
    assert len({p.file for p in captured}) == len(captured)
    assert sorted(map(str, (p.file for p in read_folder(tmp_path)))) == sorted(
        str(p.file) for p in captured
    )


def test_a_sharded_program(tmp_path, capsys):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    x = jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, P("data", "model")))
    gather = jax.jit(lambda x: jax.sharding.reshard(x, P("data", None)) * 2)
    with capture(tmp_path) as programs, jax.set_mesh(mesh):
        compiled = gather.lower(x).compile()
    (program,) = programs
    assert (program.axes, program.devices) == ({"data": 2, "model": 4}, 8)
    assert program.as_text() == compiled.as_text(), (
        "the final text, and not that of an earlier stage"
    )
    assert main([str(tmp_path), "--chip", "v5e"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "the 1 worst of 1 exposed transfers", "all-gather of 512 KiB over "
                                              "model", "test_capture.py:",
        "one run of each program on v5e, for which 1 of them was not compiled; nothing was "
        "measured",
    ):  # fmt: skip
        assert words in printed


def test_a_program_of_compile_for():
    mesh = topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", "y")))
    with capture() as programs:
        compiled = compile_for("v5e:2x2", lambda x: x.sum(), x, compiler_options=HLO_ONLY)
    (program,) = programs
    assert (program.name, program.chip, program.devices) == ("jit__lambda", "v5e", 4)
    assert (program.axes, program.as_text()) == ({"x": 2, "y": 2}, compiled.text)


def test_programs_from_the_cache_of_compiled_programs(tmp_path):
    """A program that is loaded and not compiled comes, too."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in options}

    def use(options):
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    found = []
    use(options)
    try:
        for _ in range(2):
            with capture() as programs:
                jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((8, 8))).compile()
            found.append([p.as_text() for p in programs])
            jax.clear_caches()
    finally:
        use(before)
    assert list(tmp_path.iterdir())
    assert found[0][-1] == found[1][-1]


def run(*command, cwd=ROOT, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_command_captures_a_script(tmp_path):
    status, out, err = run(
        "-m", "flaxasync.check", "capture", str(tmp_path), "--", training.__file__, "--mine", "1"
    )
    assert (status, out) == (0, "['--mine', '1']\n"), err
    names = [p.name for p in read_folder(tmp_path)]
    assert {*names} >= BOTH_STEPS
    assert f"captured {len(names)} programs: python -m flaxasync.check {tmp_path}" in err


@pytest.mark.slow
def test_the_environment_captures_a_program_that_imports_flaxasync(tmp_path):
    code = f"import flaxasync, runpy; runpy.run_path({training.__file__!r}, run_name='__main__')"
    assert run("-c", code, FLAXASYNC_CAPTURE=str(tmp_path))[0] == 0
    assert {p.name for p in read_folder(tmp_path)} >= BOTH_STEPS
    status, _, err = run(
        "-m", "flaxasync.check", "capture", "x", "--", "y.py", FLAXASYNC_CAPTURE=str(tmp_path)
    )
    assert status == 2
    assert "FLAXASYNC_CAPTURE is set, so everything is captured already" in err


@pytest.mark.slow
def test_the_command_captures_a_module_that_fails(tmp_path):
    """What was compiled before the failure is there, and the failure is the program's own."""
    (tmp_path / "mine.py").write_text(
        "import jax\njax.jit(lambda x: x + 1)(1.0)\nraise SystemExit(7)\n"
    )
    assert run("-m", "flaxasync.check", "capture", "out", "--", "-m", "mine", cwd=tmp_path)[0] == 7
    assert read_folder(tmp_path / "out")


def test_what_cannot_be_captured_or_read(tmp_path, capsys):
    """tests/check/test_command.py has the arguments that are refused."""

    def message(*arguments):
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "there is no file no/such.py" in message("capture", tmp_path, "--", "no/such.py")
    assert "has no captured programs" in message(tmp_path)
    (tmp_path / "mine.txt").write_text("HloModule m")
    for facts in ("{", '{"name": 1}'):
        (tmp_path / "mine.json").write_text(facts)
        assert "mine.json: these are no facts of a captured program" in message(tmp_path)
    with capture(tmp_path / "good"):
        compile_one(6)
    next((tmp_path / "good").glob("*.txt")).write_text("nonsense")
    assert ".txt: line 1, column 1: expected HLO text: got 'nonsense'" in message(tmp_path / "good")
