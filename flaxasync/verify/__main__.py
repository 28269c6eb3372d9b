"""Verifies every op on the devices of this machine: are its results right, and how fast is it?

    python -m flaxasync.verify [--quick] [--ops OP,...] [--json FILE] [--rehearse TOPOLOGY]

The exit status is 0 if everything that is supported is right, 1 if something is wrong, hangs or
crashes, and 2 if nothing could be verified, or not everything because the devices could not be
opened again.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import jax.numpy as jnp

from flaxasync import check
from flaxasync.check.tested_libtpu import installed_libtpu, untested
from flaxasync.hardware import describe_unknown
from flaxasync.ops import trust
from flaxasync.verify.cases import Case, Facts, list_cases
from flaxasync.verify.child import Setup
from flaxasync.verify.supervisor import describe, run_cases
from flaxasync.verify.verdict import CaseResult, Verdict, summarize

FORMAT = 3  # of the JSON file


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.verify",
        description="Verifies every op on the devices of this machine.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small shapes")
    add("--ops", default="", help="what to verify, such as all_gather_matmul/fused,attention")
    add("--json", metavar="FILE", help="write everything that was found to a file")
    rehearse = (
        "do what a run on such chips does, such as v5e:2x4, without a TPU: times are those of a "
        "simulator, values are those of small shapes on CPU devices, and no verdict is stored"
    )
    add("--rehearse", metavar="TOPOLOGY", help=rehearse)
    chosen = parser.parse_args(arguments)
    setup = Setup(rehearse=chosen.rehearse)
    only = [name for name in chosen.ops.split(",") if name]
    try:
        list_cases("cpu", 1, quick=True, only=only)  # a wrong name is reported
        if chosen.json:
            _check_writable(chosen.json)  # not after an hour of measurements
        if setup.rehearse:
            # says what is wrong with the name, or that libtpu is missing
            check.topology_devices(setup.rehearse)
        machine = describe(setup)
    except (RuntimeError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe_in_words(machine))
    cases = list_cases(
        machine["platform"],
        machine["devices"],
        quick=chosen.quick,
        only=only,
        rehearse=bool(setup.rehearse),
    )
    results = verify(cases, machine, setup)
    print(summarize(results, machine))
    stored = record_verdicts(results, machine)
    if stored is not None:
        print(f"the verdicts are in {stored}")
    if chosen.json:
        found = [dataclasses.asdict(result) for result in results]
        content: Facts = {"format": FORMAT, "machine": machine, "results": found}
        pathlib.Path(chosen.json).write_text(json.dumps(content, indent=1) + "\n")
    if any(result.verdict is Verdict.NOT_RUN for result in results):
        return 2
    return int(any(result.verdict.bad for result in results))


def _check_writable(file: str) -> None:
    try:
        pathlib.Path(file).open("a").close()
    except OSError as error:
        raise ValueError(f"--json cannot be written: {error}") from error


def verify(cases: list[Case], machine: Facts, setup: Setup) -> list[CaseResult]:
    """Runs cases, prints a line for each, and returns their results in the same order.

    The verdict of each case is stored as soon as it is known, so that a run that is ended leaves
    what it found.
    """
    results = []
    for result in run_cases(cases, setup):
        results.append(result)
        record_verdicts([result], machine)
        if result.verdict is not Verdict.NOT_RUN:  # the summary says why, once for all of them
            print(result, flush=True)
    return results


def record_verdicts(results: list[CaseResult], machine: Facts) -> pathlib.Path | None:
    """Stores verdicts of TPU kernels, and times, where calls without a backend find them; returns
    the file. None where there are none, or in a rehearsal, which no run may trust.
    """
    verdicts: dict[str, dict[str, str]] = {}
    times: dict[str, dict[str, float]] = {}
    for result in results:
        case = result.case
        if result.verdict in (Verdict.UNSUPPORTED, Verdict.NOT_RUN):
            continue
        for name in case.verified:
            verdicts.setdefault(name, {})[case.text] = str(result.verdict)
        # as calls without other options execute it
        if result.seconds is not None and case.directions != 1 and case.quantization is None:
            call = trust.call_key(case.op, case.mesh, case.shapes, jnp.dtype(case.dtype).itemsize)
            times.setdefault(call, {})[case.backend] = result.seconds
    if machine["platform"] != "tpu" or machine["rehearsal"] or not (verdicts or times):
        return None
    here = trust.Machine.here(machine["chip"] or machine["kind"])
    return trust.record(here, verdicts, times)


def describe_in_words(machine: Facts) -> str:
    """Says what the machine is, in a few lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [f"{machine['devices']} x {machine['kind']} ({machine['platform']}); {versions}"]
    if machine["rehearsal"]:
        lines.insert(0, f"a rehearsal for {machine['rehearsal']}, without a TPU")
        version = untested(installed_libtpu())
        if version is not None:
            lines.append(f"note: {version}")
    if machine["platform"] == "tpu":
        lines.append(machine["ring"])
        if machine["chip"] is None:
            lines.append(describe_unknown(machine["kind"]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
