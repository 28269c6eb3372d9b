"""What several processes trust: two that read different files, versions and variables trace one
program.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from flaxasync.ops import trust
from tests.processes import environments

PROCESS = pathlib.Path(__file__).with_name("trusting_process.py")


def run_two(second, folder):
    """Runs two processes that ask; each has four devices, a cache folder with a verdict, and its
    own variables. Returns what they print, as JSON, and their exit codes.
    """
    processes = []
    own = {"VERDICT": "PASS"} | second[0], second[1]
    for rank, (mine, joining) in enumerate(zip(own, environments(2), strict=True)):
        known = {"XDG_CACHE_HOME": str(folder / str(rank))}
        environment = {name: text for name, text in os.environ.items() if name != trust.VARIABLE}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(PROCESS)], **pipes, env=environment | joining | known | mine
            )
        )
    return [(process.communicate(timeout=120), process.wait()) for process in processes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "taken", "reason"),
    [
        ({}, {"VERDICT": ""}, "fused", ""),
        (
            {"VERDICT": "WRONG"},
            {"VERDICT": "PASS"},
            "none",
            "'fused', which was WRONG on v5e with libtpu",
        ),
        (
            {},
            {
                "VERDICT": "PASS",
                "LIBTPU_INIT_ARGS": "--xla_tpu_enable_async_collective_fusion=true",
            },
            "none",
            "the processes differ, and none of them trusts a kernel: libtpu_options is not the "
            "same in process 0 and in process 1",
        ),
    ],
    ids=["no file in process 1", "another verdict in process 0", "other options"],
)
def test_two_processes_take_what_the_file_of_process_0_trusts(
    first, second, taken, reason, tmp_path
):
    for (out, err), status in run_two((first, second), tmp_path):
        assert status == 0, err
        found, said = json.loads(out.splitlines()[-1])  # after lines of Gloo
        assert found == [taken] * 2
        # "" is in every line, and there is none
        assert sum(reason in line for line in said) == bool(reason)


@pytest.mark.slow
def test_a_process_that_asks_alone_says_so(tmp_path):
    # The one that comes late gives up as soon: the other one waits for its end before its own.
    limit = {"LIMIT": "2"}
    late = limit | {"VERDICT": "PASS", "LATE": "6"}
    ((_, err), status), _ = run_two((limit, late), tmp_path)
    assert status != 0
    assert "not all of them asked within 2 s; call flaxasync.ops.trust.known in all" in err
