"""Tests of a run of several processes: each loads its own rows, and the losses are those of a single process."""

import json
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

from train.run import main


@pytest.fixture
def launch(start):
    """A function that starts two processes of four devices each, with the environment variables of Open MPI."""

    def two(*options: object):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {
            "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://127.0.0.1:{port}",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "OMPI_COMM_WORLD_SIZE": "2",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        }
        join = ("--mesh.distributed", "True", "--mesh.cpu_devices", 4)
        return [
            start(*join, *options, **common, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_RANK="0")
            for rank in range(2)
        ]

    return two


def losses_of(workdir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_train_as_one_and_stop_together(preset, launch, tmp_path, monkeypatch, trainer_of):
    monkeypatch.setattr("train.lifecycle.Trainer", trainer_of)
    common = ("--eval.every", "0", "--eval.sample_tokens", "0")
    assert main([str(preset("auto")), *common, "--steps", "10", "--workdir", str(tmp_path / "one")]) == 0

    both = launch(*common, "--steps", 100_000, "--checkpoint.every", 100_000, "--workdir", tmp_path / "two")
    for line in both[0].stdout:
        if line.startswith("step 10/"):
            both[1].send_signal(signal.SIGTERM)
            break
    printed = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [75, 75], printed
    assert "stopped by SIGTERM after step" in printed[0][0]
    assert not any("step" in line for line in printed[1][0].splitlines()), "only the first process prints"
    assert len(list((tmp_path / "two" / "checkpoints").iterdir())) == 1
    np.testing.assert_allclose(losses_of(tmp_path / "two")[:10], losses_of(tmp_path / "one"), rtol=1e-5)
