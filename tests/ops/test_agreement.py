"""What several processes agree on: two that read different files, versions and variables trace one
program.
"""

import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import pytest
from jax._src import distributed

from flaxasync.ops import trust
from flaxasync.ops.agreement import Evidence, MeetingError, combine, exchange
from tests.processes import environments

FUSED = "all_gather_matmul/fused/3+"
PROCESS = pathlib.Path(__file__).with_name("agreeing_process.py")
PASSED = {FUSED: "PASS"}


def said(verdicts=PASSED, variable="not set", **machine):
    settings = {"FLAXASYNC_VERIFIED": variable, "chip": "v5e", "libtpu": "1"} | machine
    return {"rule": "stored", "verdicts": dict(verdicts), "times": {}, "settings": settings}


@pytest.mark.parametrize(
    ("second", "agreed", "reason"),
    [
        (said(), Evidence("stored", PASSED), ""),
        (
            said(verdicts={FUSED: "WRONG"}),
            Evidence("stored", {FUSED: "WRONG"}),
            f"trust only kernels that passed in all of them: {FUSED} is PASS in process 0 and "
            "WRONG in process 1",
        ),
        (
            said(verdicts={}),
            Evidence("stored"),
            f"{FUSED} is PASS in process 0 and missing in process 1",
        ),
        (
            said(libtpu="2"),
            Evidence("none"),
            "libtpu is '1' in process 0 and '2' in process 1; it must be the same",
        ),
        (
            said(variable="a"),
            Evidence("none"),
            "FLAXASYNC_VERIFIED is 'not set' in process 0 and 'a' in process 1",
        ),
        (
            said(later="field"),
            Evidence("none"),
            "later is None in process 0 and 'field' in process 1",
        ),
    ],
)
def test_kernels_are_trusted_that_all_processes_trust(second, agreed, reason):
    found, why = combine([said(), second])
    assert (found, reason in why, bool(why)) == (agreed, True, bool(reason))
    swapped, _ = combine([second, said()])
    assert swapped == agreed


@pytest.mark.parametrize(
    ("error", "what"),
    [
        ("DEADLINE_EXCEEDED: late", "not all of them came within 2 s"),
        ("ALREADY_EXISTS: x", "their coordinator failed"),
    ],
)
def test_only_a_process_that_is_late_is_called_late(error, what, monkeypatch):
    client = mock.Mock()
    client.wait_at_barrier.side_effect = jax.errors.JaxRuntimeError(error)
    monkeypatch.setattr(distributed.global_state, "client", client)
    with pytest.raises(MeetingError, match=f"^{what}: {error}$"):
        exchange("a topic", "a text", 2)


def test_a_message_names_a_few_of_many_differences():
    many = {f"op{i}/fused/3+": "PASS" for i in range(9)}
    _, reason = combine([said(verdicts=many), said(verdicts={}), said(verdicts=many)])
    assert reason.count("missing in process 1") == 3
    assert reason.endswith(" and 6 more")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "variables", "reason"),
    [
        ("PASS", {}, ""),
        ("WRONG", {}, f"{FUSED} is PASS in process 0 and WRONG in process 1"),
        (
            "PASS",
            {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_async_collective_fusion=true"},
            "the processes differ, and none of them trusts a kernel: libtpu_options is '' in "
            "process 0 and '--xla_tpu_",
        ),
        (
            "PASS",
            {"LATE": "4", "LIMIT": "2"},
            "and no kernel is trusted: not all of them came within 2 s",
        ),
    ],
    ids=["the same", "another verdict", "other options", "late"],
)
def test_two_processes_take_the_kernel_that_both_trust_or_plain_xla_and_say_why(
    verdict, variables, reason, tmp_path
):
    """Each has four devices, a cache folder with a verdict, and its own variables; the pod is
    described.
    """
    processes = []
    own = {"VERDICT": "PASS"}, {"VERDICT": verdict} | variables
    for rank, (mine, joining) in enumerate(zip(own, environments(2), strict=True)):
        known = {"XDG_CACHE_HOME": str(tmp_path / str(rank)), "LIMIT": variables.get("LIMIT", "60")}
        environment = {name: text for name, text in os.environ.items() if name != trust.VARIABLE}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, str(PROCESS)]
        processes.append(
            subprocess.Popen(command, **pipes, env=environment | joining | known | mine)
        )
    printed = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    for taken, said in (json.loads(out) for out, _ in printed):
        assert taken == ["none" if reason else "fused"] * 2
        # "" is in every line, and there is none
        assert sum(reason in line for line in said) == bool(reason)
