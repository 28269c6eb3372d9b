"""Whole runs whose workdir is on a server of the S3 protocol."""

import json
import os
import re
import signal
from pathlib import Path

import fsspec
import pytest


@pytest.fixture
def server(monkeypatch):
    """A server of the S3 protocol with a bucket, and the environment with which a run reaches it."""
    from moto.server import ThreadedMotoServer  # imported here, because only the slow tests need it

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    store.mkdir("bucket")
    yield store, environment
    server.stop()


@pytest.mark.slow
def test_a_run_on_a_server_continues_on_another_machine(server, start, tmp_path, text):
    store, environment = server
    store.put_file(str(text), "bucket/data/text.txt")
    command = ("--workdir", "s3://bucket/run", "--data.path", "s3://bucket/data/text.txt", "--eval.every", 0)

    def finish(machine: str, *options: object, after: int | None = None) -> tuple[int, str, str]:
        process = start(*command, *options, XDG_CACHE_HOME=str(tmp_path / machine), **environment)
        if after is not None:
            for line in process.stdout:
                if line.startswith(f"step {after}/"):
                    break
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    code, out, err = finish("first", "--steps", 30, after=10)
    assert (code, err) == (75, ""), out + err
    step = int(re.search(r"after step (\d+), saved in", out)[1])
    assert store.find(f"bucket/run/checkpoints/{step}")
    assert not store.find("bucket/run/.incomplete")
    code, out, err = finish("second", "--steps", 30)
    assert (code, err) == (0, ""), out + err
    assert "stored     s3://bucket/run" in out
    lines = [json.loads(line) for line in store.cat_file("bucket/run/metrics.jsonl").splitlines()]
    plain = start("--steps", 30, "--workdir", tmp_path / "plain", "--eval.every", 0)
    assert plain.communicate(timeout=240)[1] == ""
    expected = [json.loads(line) for line in (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected]
    code, out, err = finish("third", "--steps", 30)
    assert code == 0, err
    assert "the run is complete: step 30 of 30" in out
    assert not (Path.cwd() / "s3:").exists()
    assert os.listdir(tmp_path / "third" / "flaxasync" / "workdirs")
