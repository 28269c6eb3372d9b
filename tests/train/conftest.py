"""A minuscule run: small enough that a process trains it in seconds, large enough for every mesh of eight devices."""

import dataclasses
import functools
import os
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from models.transformer import TransformerConfig
from tests.train.launcher import Launcher, Run
from train.config import CheckpointConfig, Config, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, ReportConfig
from train.mesh import make_mesh
from train.step import Trainer

# The rate of step s is s * 3e-4 in a run of any length, so that all runs share the few programs that are compiled here.
RISING = OptimizerConfig(learning_rate=300.0, warmup_steps=10**6)
PRESET = """
from models.transformer import TransformerConfig
from train.config import *


def minuscule():
    return Config(
        workdir="{workdir}",
        steps=60,
        mesh=MeshConfig(data=2, model=4, platform="{platform}"),
        model=TransformerConfig(vocab_size=128, layers=2, width=16, heads=8, kv_heads=8, mlp_width=32),
        data=DataConfig(path="{text}", sequence_length=16, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=300.0, warmup_steps=10**6),
        checkpoint=CheckpointConfig(every=7),
        eval=EvalConfig(every=20, batches=2, sample_tokens=8),
        report=ReportConfig(every=1),
    )
"""


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory) -> Path:
    """A folder of compiled programs: the tests here, and the processes they start, compile the same few again."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # that of this worker, in that of all
    return folder / "compiled"


@pytest.fixture(autouse=True)
def compile_little(compiled_programs, request):
    """Most of the time here would be compiling. `optimized` exempts a test: there the program itself is the matter."""
    if request.node.get_closest_marker("optimized"):
        yield {}
        return
    settings = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(compiled_programs),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_compilation_cache_max_size": 2
        ** 30,  # with a limit JAX locks it: no process reads what another still writes
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
    """24 kB of ASCII that no two lines of are alike."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog {i * i}\n" for i in range(400)))
    return path


@pytest.fixture
def config(text, tmp_path) -> Config:
    """The minuscule run on all eight devices of the test process."""
    return Config(
        workdir=str(tmp_path / "run"),
        steps=20,
        mesh=MeshConfig(data=2, model=4),
        model=TransformerConfig(vocab_size=128, layers=2, width=16, heads=8, kv_heads=8, mlp_width=32),
        data=DataConfig(path=str(text), sequence_length=16, batch_size=8),
        optimizer=RISING,
        checkpoint=CheckpointConfig(every=5, keep=2),
        eval=EvalConfig(every=10, batches=2, sample_tokens=4),
        report=ReportConfig(every=2),
    )


@pytest.fixture
def mesh(config):
    """The mesh of `config`, as the ambient one."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="session")
def trainer_of():
    """Makes one trainer for all that the same programs serve: (config, mesh) -> Trainer.

    Tracing takes longer than most tests. The length of a run makes no other program with RISING.
    """

    @functools.cache
    def make(config, mesh, _compiled_little):
        trainer = Trainer(config, mesh)
        trainer.compile_train_step = functools.cache(trainer.compile_train_step)
        return trainer

    def trainer_of(config, mesh):
        used = {name: getattr(config, name) for name in ("mesh", "model", "data", "optimizer", "backend", "seed")}
        rising = config.optimizer.warmup_steps == RISING.warmup_steps
        served = Config(workdir="", steps=60 if rising else config.steps, **used)
        return make(served, mesh, jax.config.read("jax_disable_most_optimizations"))

    return trainer_of


@pytest.fixture
def preset(text, tmp_path):
    """Writes the minuscule run as a preset file; `platform="auto"` suits a test that stays in this process."""

    def write(platform: str = "cpu") -> Path:
        path = tmp_path / f"minuscule_{platform}.py"
        path.write_text(PRESET.format(workdir=tmp_path / "run", text=text, platform=platform))
        return path

    return write


@pytest.fixture(scope="session")
def launcher():
    """Forks processes; it imports what they need while the first test that asks for it goes on."""
    launcher = Launcher(os.environ)
    yield launcher
    launcher.close()


@pytest.fixture
def start(preset, compile_little, launcher):
    """Starts train/run.py on the minuscule run in a process of its own, which is forked and need not import."""
    runs = []

    def launch(*options: object, terminal: int | None = None, **environment: str) -> Run:
        environment = os.environ | compile_little | environment
        runs.append(launcher.start([str(preset()), *map(str, options)], environment=environment, terminal=terminal))
        return runs[-1]

    yield launch
    for run in runs:
        run.kill()
        run.communicate()


def replace(config: Config, **sections: dict) -> Config:
    """Returns `config` with fields of its sections replaced: `replace(config, data={"batch_size": 2})`."""
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    )


@pytest.fixture(name="replace")
def replace_fixture():
    return replace
