"""Tests of `python -m flaxasync.verify --distributed`: two processes, each with a part of the
devices, as two hosts.
"""

import json
import os
import subprocess
import sys

import pytest

from flaxasync.verify import child
from tests.processes import environments

HOST = """
import sys
from flaxasync.verify.__main__ import main
from tests.verify.faulty_child import serve
sys.exit(main(sys.argv[1:], serve=serve))
"""


def measurement(seconds, **errors):
    return {"measurement": {"errors": errors, "tolerance": 1e-2, "timing": {"seconds": seconds}}}


def test_the_outcome_of_a_case_is_that_of_the_slowest_host_with_the_largest_errors():
    found = child.combine(
        [measurement(2.0, y=1e-3, dx=0.0), measurement(1.0, y=0.0, dx=float("inf"))]
    )
    assert found == measurement(2.0, y=1e-3, dx=float("inf"))
    # An error on one host is that of all, and names its process.
    fine, error, lacks = (
        measurement(1.0, y=0.0),
        {"error": "no"},
        {"unsupported": "needs squares"},
    )
    assert child.combine([fine, lacks, error]) == {"error": "in process 2: no"}
    assert child.combine([fine, lacks]) == {"unsupported": "in process 1: needs squares"}
    assert child.combine([lacks, lacks]) == lacks


def verify_on_two_hosts(folder, *ops, faulty_rank):
    """Verifies two devices of each of two processes; returns their statuses, texts and verdicts."""
    options = [
        "--distributed",
        "--platform",
        "cpu",
        "--cpu-devices",
        "2",
        "--quick",
        "--limit",
        "10",
    ]
    processes = []
    for rank, joining in enumerate(environments(2)):
        own = ["--ops", ops[rank % len(ops)], "--json", str(folder / f"{rank}.json")]
        command = [sys.executable, "-c", HOST, *options, *own]
        environment = os.environ | joining | {"FAULTY_RANK": faulty_rank}
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        )
    texts = [process.communicate(timeout=300)[0] for process in processes]
    results = [json.loads((folder / f"{rank}.json").read_text())["results"] for rank in range(2)]
    verdicts = [
        [(r["case"]["op"], r["case"]["backend"], r["verdict"]) for r in found] for found in results
    ]
    return [process.returncode for process in processes], texts, verdicts


@pytest.mark.slow
def test_hosts_verify_rings_that_cross_them_and_go_on_together_after_one_of_them_hangs(tmp_path):
    ops = "all_gather_matmul/xla,matmul_reduce_scatter/xla,ppermute/xla"
    codes, texts, (first, second) = verify_on_two_hosts(tmp_path, ops, faulty_rank="1")
    assert codes == [1, 1]
    assert all(text.startswith("4 x cpu (cpu)") for text in texts)
    assert first == second == [
        ("all_gather_matmul", "none", "PASS"),
        ("all_gather_matmul", "xla", "WRONG"),  # on one host alone
        ("all_gather_matmul", "xla", "WRONG"),
        ("matmul_reduce_scatter", "none", "PASS"),
        ("matmul_reduce_scatter", "xla", "HUNG"),
        ("matmul_reduce_scatter", "xla", "HUNG"),
        ("ppermute", "xla", "PASS"),
    ]  # fmt: skip


@pytest.mark.slow
def test_hosts_that_got_different_commands_run_nothing(tmp_path):
    codes, texts, verdicts = verify_on_two_hosts(
        tmp_path, "ppermute/xla", "all_gather/xla", faulty_rank="none"
    )
    assert codes == [2, 2]
    assert verdicts == [[("ppermute", "xla", "NOT RUN")], [("all_gather", "xla", "NOT RUN")]]
    message = "the hosts have different cases to run: start the same command on every host"
    assert all(f"1 cases have no verdict: {message}" in text for text in texts)
