"""A folder that XLA dumped: which of its files are programs, and what is said of them."""

import os
import pathlib
import subprocess
import sys

import pytest

from flaxasync.check.__main__ import main
from flaxasync.check.dump_folder import read_dump
from tests.check.hlo_texts import STEP

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("model",))
x = jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, P("model", None)))

def gather(x):
    return jax.sharding.reshard(x, P(None, None)) * 2

with jax.set_mesh(mesh):
    jax.jit(gather)(x).block_until_ready()
"""


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Returns the folder that XLA dumps for a program that gathers, and knows nothing of
    flaxasync.
    """
    folder = tmp_path_factory.mktemp("dump")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_dump_to={folder}",
        "JAX_COMPILATION_CACHE_DIR": "",
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    return folder


def test_the_final_programs_of_a_real_dump_are_read_and_named(dump, capsys):
    final = {file.name for file in dump.glob("*after_optimizations.txt")}
    assert len(final) < len(list(dump.glob("*.txt"))) / 2, "the others are earlier stages"
    assert main([str(dump), "--chip", "v5e"]) == 0
    printed = capsys.readouterr().out
    assert f"read {len(final)} files *after_optimizations.txt (estimated on v5e):" in printed
    assert all(name in printed for name in final)
    assert "before_optimizations" not in printed
    longest = read_dump(dump, chip="v5e")[0]
    assert (longest.report.module, longest.devices) == ("jit_gather", 4)
    assert longest.time.exposed > 0
    assert f"{longest.file.name}, the longest:\naudit of jit_gather (v5e): ok" in printed
    assert main([str(dump), "--fail-on", "warning"]) == 1, "the gather is synchronous"


@pytest.mark.slow
def test_a_dump_of_the_compiler_for_tpus_is_read(tmp_path):
    code = """
import jax
from flaxasync import check
check.compile_for("v5e:2x2", lambda x: x @ x, jax.ShapeDtypeStruct((512, 512), "bfloat16"))
"""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"--xla_dump_to={tmp_path / 'dump'}",
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=tmp_path)
    (program,) = [
        program
        for program in read_dump(tmp_path / "dump", chip="v5e")
        if program.report.module == "jit__lambda"
    ]
    assert main([str(tmp_path / "dump")]) == 0
    assert program.time.seconds > 0


def test_what_is_in_a_folder(tmp_path, capsys):
    """Worst findings decide about the status, and a file that cannot be read is named."""
    final = tmp_path / "module_0001.jit_step.tpu_after_optimizations.txt"
    final.write_text(STEP)
    (tmp_path / "module_0001.jit_step.before_optimizations.txt").write_text("no HLO")
    assert main([str(tmp_path)]) == 0
    broken = tmp_path / "module_0002.jit_eval.after_optimizations.txt"
    broken.write_text("nonsense")
    capsys.readouterr()
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{broken.name}: line 1, column 1: expected HLO text: got 'nonsense'" in error


def test_a_folder_without_a_final_program_says_how_to_dump_one(tmp_path, capsys):
    (tmp_path / "module_0001.jit_step.before_optimizations.txt").write_text(STEP)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}: there is no *after_optimizations.txt in it" in error
    assert f"XLA_FLAGS='--xla_dump_to={tmp_path} --xla_dump_hlo_as_text' python" in error
