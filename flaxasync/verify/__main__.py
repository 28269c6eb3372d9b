"""Verifies every op on the devices of this machine: are its results right, and how fast is it?

    python -m flaxasync.verify [--quick] [--ops OP[/BACKEND],...] [--json FILE] [--rehearse TOPOLOGY]

The exit status is 0 if everything that is supported is right, 1 if something is wrong, hangs or
crashes, and 2 if nothing could be verified, or not everything because the devices could not be
opened again.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import jax.numpy as jnp

from flaxasync import check
from flaxasync.check.tested_libtpu import installed_libtpu, untested
from flaxasync.hardware import describe_unknown
from flaxasync.ops import trust
from flaxasync.verify.cases import Case, Facts, list_cases, unsupported
from flaxasync.verify.child import Serve, Setup, serve
from flaxasync.verify.supervisor import describe, run_cases
from flaxasync.verify.verdict import CaseResult, Verdict, compare_times, judge, summarize

FORMAT = 2  # of the JSON file
LIMIT = 300  # seconds after which a case hangs
QUICK_LIMIT = 90  # and a quick one on devices


def main(arguments: list[str] | None = None, *, serve: Serve = serve) -> int:
    """Runs the command line and returns its exit status; `serve` is what a child process does."""
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.verify", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small shapes; on CPUs also simulated TPU kernels")
    add("--ops", default="", help="what to verify, such as all_gather_matmul/fused,attention")
    add("--json", metavar="FILE", help="write everything that was found to a file")
    platform = "where JAX must run (default: it chooses)"
    add("--platform", choices=("cpu", "gpu", "tpu"), help=platform)
    devices = f"devices that a CPU is divided into (default: {Setup.cpu_devices})"
    add("--cpu-devices", type=int, default=Setup.cpu_devices, help=devices)
    seconds = (
        f"seconds after which a case hangs (default: {LIMIT}; quick, on devices: {QUICK_LIMIT})"
    )
    add("--limit", type=float, help=seconds)
    rehearse = (
        "do what a run on such chips does, such as v5e:2x4, without a TPU: times are those of a "
        "simulator, values are those of small shapes on CPU devices, and no verdict is stored"
    )
    add("--rehearse", metavar="TOPOLOGY", help=rehearse)
    chosen = parser.parse_args(arguments)
    if chosen.rehearse and (chosen.platform or chosen.cpu_devices != Setup.cpu_devices):
        parser.error(
            "--rehearse excludes --platform and --cpu-devices: it runs on four CPU devices"
        )
    repeats = 3
    limit = LIMIT
    if chosen.quick:
        repeats = 1
        if not chosen.rehearse:
            limit = QUICK_LIMIT
    if chosen.limit is not None:
        if not chosen.limit > 0:
            parser.error(f"--limit must be above 0: got {chosen.limit:g}")
        limit = chosen.limit
    setup = Setup(
        platform={"gpu": "cuda"}.get(chosen.platform, chosen.platform),
        cpu_devices=chosen.cpu_devices,
        repeats=repeats,
        limit=limit,
        serve=serve,
        rehearse=chosen.rehearse,
    )
    only = [name for name in chosen.ops.split(",") if name]
    try:
        machine = _machine(setup, only, chosen.json)
    except (RuntimeError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _run(machine, setup, only, quick=chosen.quick, file=chosen.json)


def _machine(setup: Setup, only: list[str], file: str | None) -> Facts:
    """Describes the machine, after a look at all that can be wrong with the options."""
    if file:
        try:
            pathlib.Path(file).open("a").close()  # not after an hour of measurements
        except OSError as error:
            raise ValueError(f"--json cannot be written: {error}") from error
    list_cases("cpu", 1, quick=True, only=only)  # a wrong name is reported
    if setup.rehearse:
        # says what is wrong with the name, or that libtpu is missing
        check.topology_devices(setup.rehearse)
    return describe(setup)


def _run(machine: Facts, setup: Setup, only: list[str], *, quick: bool, file: str | None) -> int:
    """Verifies the cases of a machine, prints and stores what was found, and returns the exit
    status.
    """
    began = time.monotonic()
    cases = list_cases(
        machine["platform"],
        machine["devices"],
        chip=machine["chip"],
        quick=quick,
        only=only,
        rehearse=setup.rehearse is not None,
    )
    print(describe_in_words(machine))
    version = untested(installed_libtpu())
    if setup.rehearse and version is not None:
        print(f"note: {version}")
    results = verify(cases, machine, setup, quick=quick)
    print(f"{summarize(results, machine)}\n{time.monotonic() - began:.0f} s")
    stored = record_verdicts(results, machine)
    if stored is not None:
        print(f"the verdicts are in {stored}")
    if file:
        content: Facts = {"format": FORMAT, "machine": machine}
        if setup.rehearse:
            content["rehearsal"] = setup.rehearse
        content["results"] = [dataclasses.asdict(result) for result in results]
        pathlib.Path(file).write_text(json.dumps(content, indent=1) + "\n")
    if any(result.verdict is Verdict.NOT_RUN for result in results):
        return 2
    return int(any(result.verdict.bad for result in results))


def verify(cases: list[Case], machine: Facts, setup: Setup, *, quick: bool) -> list[CaseResult]:
    """Runs cases, prints a line for each, and returns their results in the same order.

    The verdict of each case is stored as soon as it is known, so that a run that is ended leaves
    what it found.
    """
    found: dict[Case, CaseResult] = {}
    for case in cases:
        reason = unsupported(case, machine["platform"], quick=quick)
        if reason is not None:
            found[case] = CaseResult(case, Verdict.UNSUPPORTED, reason)
            print(found[case])
    runnable = [case for case in cases if case not in found]
    for case, outcome in zip(runnable, run_cases(runnable, setup), strict=True):
        found[case] = judge(outcome, case)
        if found[case].verdict is Verdict.NOT_RUN:  # the summary says why, once for all of them
            continue
        # it runs before the others of its op
        plain = [result for result in found.values() if result.case.plain]
        result = compare_times([*plain, found[case]], machine)[-1]
        record_verdicts([result], machine)
        print(result, flush=True)
    return compare_times([found[case] for case in cases], machine)


def record_verdicts(results: list[CaseResult], machine: Facts) -> pathlib.Path | None:
    """Stores verdicts of TPU kernels, and times, where calls without a backend find them; returns
    the file. None where there are none, or in a rehearsal, which no run may trust.
    """
    verdicts = verdicts_of(results)
    if machine["platform"] != "tpu" or machine.get("rehearsal") or not verdicts:
        return None
    here = trust.Machine.here(machine["chip"] or machine["kind"])
    return trust.record(here, verdicts, times_of(results))


def verdicts_of(results: list[CaseResult]) -> dict[str, dict[str, str]]:
    """Returns what is stored of some results: for each name of `trust.key`, the verdict of each
    case.

    A case of ring attention is stored for the kernel "flash", too, if it used that. Its time is
    that of its transfers, so only its results matter there. A case of one device sends nothing, and
    says nothing about a kernel that sends.
    """
    verdicts: dict[str, dict[str, str]] = {}
    for result in results:
        case = result.case
        alone = case.devices == 1 and case.op != "attention"
        if alone or result.verdict in (Verdict.UNSUPPORTED, Verdict.NOT_RUN):
            continue
        if case.backend not in trust.PLAIN:
            name = trust.key(case.op, case.backend, case.mesh, case.quantization)
            verdicts.setdefault(name, {})[case.text] = str(result.verdict)
        if case.takes_flash:
            right = result.verdict
            if right is Verdict.SLOWER:
                right = Verdict.PASS
            verdicts.setdefault(trust.key("attention", "flash", 1), {})[case.text] = str(right)
    return verdicts


def times_of(results: list[CaseResult]) -> dict[str, dict[str, float]]:
    """Returns the measured seconds of each op with its gradients, as calls without other options
    execute it.
    """
    times: dict[str, dict[str, float]] = {}
    for result in results:
        case = result.case
        as_called = case.gradient and case.directions != 1 and case.quantization is None
        if result.seconds is not None and result.clock == "device" and as_called:
            call = trust.call_key(case.op, case.ring, case.shapes, jnp.dtype(case.dtype).itemsize)
            times.setdefault(call, {})[case.backend] = result.seconds
    return times


def describe_in_words(machine: Facts) -> str:
    """Says what the machine is, in a few lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [f"{machine['devices']} x {machine['kind']} ({machine['platform']}); {versions}"]
    if machine.get("rehearsal"):
        lines.insert(0, f"a rehearsal for {machine['rehearsal']}, without a TPU")
    if machine["platform"] == "tpu":
        lines.append(machine["ring"])
        if machine["chip"] is None:
            lines.append(describe_unknown(machine["kind"]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
