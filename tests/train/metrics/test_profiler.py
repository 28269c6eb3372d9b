"""A real profile of training steps on CPU devices, read by `python -m flaxasync.check trace`."""

import jax
import numpy as np
import pytest

from flaxasync.check.__main__ import main
from flaxasync.check.hlo.reader import parse
from flaxasync.check.trace.exposed import measure_exposed
from flaxasync.check.trace.profile import read_profile
from train.step.mesh import token_spec


def test_the_profile_of_a_training_step_is_read(config, mesh, trainer_of, tmp_path, capsys):
    trainer = trainer_of(config, mesh)
    step, state = trainer.compile_train_step(), trainer.init()
    tokens = jax.device_put(np.ones((8, 16), np.int32), jax.NamedSharding(mesh, token_spec(mesh)))
    state, _ = jax.block_until_ready(step(state, tokens, tokens))
    with jax.profiler.trace(tmp_path):
        for _ in range(2):
            state, metrics = step(state, tokens, tokens)
        jax.block_until_ready(metrics)
    program = tmp_path / "program.txt"
    program.write_text(step.as_text())
    times = measure_exposed(read_profile(tmp_path), module=parse(program.read_text()))
    assert len(times) == 8
    for device in times:
        assert "train_step" in device.program
        assert device.runs == 2
        assert 0 < device.exposed <= device.communication <= device.seconds
        assert device.exposed == pytest.approx(sum(op.seconds for op in device.ops), rel=1e-3)
        assert {layer.name for layer in device.layers} - {""}
    assert main(["trace", str(tmp_path), "--program", str(program), "--chip", "v5e"]) == 0
    out = capsys.readouterr().out
    assert "/device:CPU:7" in out
    assert "estimated" in out
