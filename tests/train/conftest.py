"""Fixtures for a minuscule run, which a process trains in seconds and which fits every mesh of
eight devices.
"""

import dataclasses
import functools
import os
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from models.config import TransformerConfig
from tests.train.runs import without_progress
from train.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    ReportConfig,
)
from train.run import main
from train.step.mesh import make_mesh
from train.step.trainer import Trainer

# With this warm-up the learning rate of step s is s * 3e-4 in a run of any length, so that all runs
# share the few programs that are compiled here.
RISING = OptimizerConfig(learning_rate=300.0, warmup_steps=10**6)


def minuscule(text: Path, workdir: Path, platform: str) -> Config:
    return Config(
        workdir=str(workdir),
        steps=60,
        mesh=MeshConfig(data=2, model=4, platform=platform),
        model=TransformerConfig(
            vocab_size=128, layers=2, width=16, heads=8, kv_heads=8, mlp_width=32
        ),
        data=DataConfig(path=str(text), sequence_length=16, batch_size=8),
        optimizer=RISING,
        checkpoint=CheckpointConfig(every=7),
        eval=EvalConfig(every=20, batches=2),
        report=ReportConfig(every=1),
    )


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory) -> Path:
    """A cache of compiled programs, shared by all workers and by the processes that tests start."""
    folder = tmp_path_factory.getbasetemp()
    # the folder of all workers
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return folder / "compiled"


@pytest.fixture(autouse=True)
def compile_little(compiled_programs, request):
    """Compiles with few optimizations and caches the programs, because these tests would mostly
    compile.

    The mark `optimized` exempts a test whose subject is the compiled program itself.
    """
    if request.node.get_closest_marker("optimized"):
        yield {}
        return
    settings = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(compiled_programs),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # With a limit on its size JAX locks the cache, so that no process reads a file that another
        # still writes.
        "jax_compilation_cache_max_size": 2**30,
    }
    before = {name: jax.config.values[name] for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield {name.upper(): str(value) for name, value in settings.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """24 kB of ASCII text in which no two lines are equal."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(
            f"line {i}: the quick brown fox jumps over the lazy dog {i * i}\n" for i in range(400)
        )
    )
    return path


@pytest.fixture
def config(text, tmp_path) -> Config:
    """The configuration of the minuscule run on all eight devices of the test process."""
    config = dataclasses.replace(minuscule(text, tmp_path / "run", "auto"), steps=20)
    evaluation = {"every": 10}
    return replace(config, checkpoint={"every": 5, "keep": 2}, eval=evaluation, report={"every": 2})


@pytest.fixture
def mesh(config):
    """The mesh of `config`, entered with `jax.set_mesh`."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="session")
def trainer_of():
    """A function (config, mesh) -> Trainer that makes one trainer for all configurations with the
    same programs.

    Tracing takes longer than most tests. With RISING the length of a run does not change the
    programs.
    """

    @functools.cache
    def make(config, mesh, _few_optimizations):
        trainer = Trainer(config, mesh)
        trainer.compile_train_step = functools.cache(trainer.compile_train_step)
        trainer.compile_eval_step = functools.cache(trainer.compile_eval_step)
        return trainer

    def trainer_of(config, mesh):
        used = {
            name: getattr(config, name)
            for name in ("mesh", "model", "data", "optimizer", "skip", "backend", "seed")
        }
        rising = config.optimizer.warmup_steps == RISING.warmup_steps
        served = Config(workdir="", steps=60 if rising else config.steps, **used)
        return make(served, mesh, jax.config.read("jax_disable_most_optimizations"))

    return trainer_of


@pytest.fixture
def trainer(config, mesh, trainer_of):
    return trainer_of(config, mesh)


@pytest.fixture
def preset(text, tmp_path):
    """A function that writes the minuscule run as a preset file; tests that train in this process
    pass "auto".
    """

    def write(platform: str = "cpu") -> Path:
        path = tmp_path / f"minuscule_{platform}.py"
        if not path.exists():  # a process that was started a moment ago may be reading it
            imports = "from models.config import TransformerConfig\nfrom train.config import *\n"
            config = minuscule(text, tmp_path / "run", platform)
            path.write_text(f"{imports}def preset():\n    return {config}\n")
        return path

    return write


@pytest.fixture
def run(preset, capsys, monkeypatch, trainer_of):
    """Runs the script's `main` in this process, on its eight devices; returns (exit code, stdout,
    stderr).
    """
    monkeypatch.setattr("train.lifecycle.training.Trainer", trainer_of)

    def call(*options: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(preset("auto")), *map(str, options)])
        out, err = capsys.readouterr()
        return code, out, without_progress(err)

    return call


@pytest.fixture
def refuses(capsys):
    """A function that checks that a command ends with code 2 and one line on standard error, which
    says something, and returns the line.
    """

    def refuses(command, says: str, *arguments: object) -> str:
        capsys.readouterr()
        assert command([*map(str, arguments)]) == 2
        err = without_progress(capsys.readouterr().err)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert says in err
        return err

    return refuses


def replace(config: Config, **sections: dict) -> Config:
    """Returns `config` with fields of its sections replaced: `replace(config, data={"batch_size":
    2})`.
    """
    return dataclasses.replace(
        config,
        **{
            name: dataclasses.replace(getattr(config, name), **fields)
            for name, fields in sections.items()
        },
    )


@pytest.fixture(name="replace")
def replace_fixture():
    return replace
