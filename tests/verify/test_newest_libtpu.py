"""The newest libtpu: do kernels compile with it, and can their programs be simulated?

All other tests use the version that `jax[tpu]` installs. The next JAX will install a later one.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OPS = "ppermute/pallas,all_gather_matmul/fused"
# Values come from CPU devices, whichever libtpu there is.
REHEARSAL = """
import functools, sys
from flaxasync.verify import __main__ as verify_command
from tests.verify.sparing_child import without_values
verify_command.Setup = functools.partial(verify_command.Setup, serve=without_values)
sys.exit(verify_command.main(sys.argv[1:]))
"""


@pytest.fixture
def newest():
    """A folder with the newest libtpu, of 640 MB, so that it is not kept as pytest keeps its
    temporary folders.
    """
    with tempfile.TemporaryDirectory(prefix="flaxasync-test-") as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-compile",
            "--target",
            folder,
        ]
        installed = subprocess.run([*pip, "libtpu"], capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(
                f"pip could not install the newest libtpu: {installed.stderr.strip()[-200:]}"
            )
        yield pathlib.Path(folder)


@pytest.mark.slow
def test_kernels_are_rehearsed_with_the_newest_libtpu(newest, tmp_path):
    (metadata,) = newest.glob("libtpu-*.dist-info")
    environment = os.environ | {"PYTHONPATH": f"{newest}{os.pathsep}{ROOT}"}
    file = tmp_path / "verdicts.json"
    options = ["--rehearse", "v5e:2x4", "--quick", "--ops", OPS, "--json", str(file)]
    ended = subprocess.run(
        [sys.executable, "-c", REHEARSAL, *options],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content = json.loads(file.read_text())
    assert f"libtpu-{content['machine']['versions']['libtpu']}.dist-info" == metadata.name
    simulated = [
        result["seconds"]
        for result in content["results"]
        if result["case"]["backend"] in ("pallas", "fused")
        and result["case"]["quantization"] != "fp8"  # which a v5e lacks
    ]
    assert len(simulated) >= 7
    assert all(seconds > 0 for seconds in simulated)
