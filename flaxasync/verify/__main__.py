"""Verifies every op on the devices of this machine: are its results right, and how fast is it?

    python -m flaxasync.verify [--quick] [--ops OP[/BACKEND],...] [--json FILE] [--distributed | --rehearse TOPOLOGY]

The exit status is 0 if everything that is supported is right, 1 if something is wrong, hangs or
crashes, and 2 if nothing could be verified, or not everything because the devices could not be
opened again.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax.numpy as jnp

from flaxasync import check
from flaxasync.check.tested_libtpu import installed_libtpu, untested
from flaxasync.hardware import describe_unknown
from flaxasync.ops import trust
from flaxasync.verify.cases import Case, list_cases, unsupported
from flaxasync.verify.child import Serve, Setup, serve
from flaxasync.verify.rehearsal import read_back, stored_aside
from flaxasync.verify.supervisor import describe, run_cases
from flaxasync.verify.verdict import Result, Verdict, compare_times, judge, summarize

FORMAT = 2  # of the JSON file


def main(arguments: list[str] | None = None, *, serve: Serve = serve) -> int:
    """Runs the command line and returns its exit status; `serve` is what a child process does."""
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.verify", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes; on CPUs also the TPU kernels, simulated"
    )
    parser.add_argument(
        "--ops", default="", help="what to verify, such as all_gather_matmul/fused,attention"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was found to a file")
    parser.add_argument(
        "--platform", choices=("cpu", "gpu", "tpu"), help="where JAX must run (default: it chooses)"
    )
    parser.add_argument(
        "--cpu-devices", type=int, help="devices that a CPU is divided into (default: 4)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        help="seconds after which a case hangs (default: 300; quick, on devices: 90)",
    )
    parser.add_argument(
        "--distributed", action="store_true", help="on a pod: the same command runs on every host"
    )
    parser.add_argument(
        "--rehearse",
        metavar="TOPOLOGY",
        help="do what a run on such chips does, such as v5e:2x4, without a TPU: times are those of "
        "a simulator, values "
        "are those of small shapes on CPU devices, and no run trusts the verdicts",
    )
    chosen = parser.parse_args(arguments)
    for option in ("platform", "distributed", "cpu_devices"):
        if chosen.rehearse and (value := getattr(chosen, option)):
            other = f"--{option.replace('_', '-')}" + (
                f" {value}" if option != "distributed" else ""
            )
            parser.error(
                f"--rehearse and {other} exclude each other: a rehearsal runs on four CPU devices"
            )
    with stored_aside() if chosen.rehearse else contextlib.nullcontext():
        return _run(chosen, serve)


def _run(chosen: argparse.Namespace, serve: Serve) -> int:
    """Runs the command with the options that were chosen, and returns its exit status."""
    setup = Setup(
        platform={"gpu": "cuda"}.get(chosen.platform, chosen.platform),
        cpu_devices=chosen.cpu_devices or Setup.cpu_devices,
        repeats=1 if chosen.quick else 3,
        limit=chosen.limit or (90 if chosen.quick and not chosen.rehearse else 300),
        serve=serve,
        distributed=chosen.distributed,
        rehearse=chosen.rehearse,
    )
    began = time.monotonic()
    only = [name for name in chosen.ops.split(",") if name]
    try:
        if chosen.json:
            try:
                pathlib.Path(chosen.json).open("a").close()  # not after an hour of measurements
            except OSError as error:
                raise ValueError(f"--json cannot be written: {error}") from error
        # a wrong name is reported before the devices are opened
        list_cases("cpu", 1, quick=True, only=only)
        if chosen.rehearse:
            # says what is wrong with the name, or that libtpu is missing
            check.topology_devices(chosen.rehearse)
        machine = describe(setup)
    except (RuntimeError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cases = list_cases(
        machine["platform"],
        machine["devices"],
        chip=machine["chip"],
        quick=chosen.quick,
        only=only,
        rehearse=bool(chosen.rehearse),
    )
    print(describe_in_words(machine))
    version = untested(installed_libtpu()) if chosen.rehearse else None
    if version is not None:
        print(f"note: {version}")
    results = verify(cases, machine, setup, quick=chosen.quick)
    print(f"{summarize(results, machine)}\n{time.monotonic() - began:.0f} s")
    stored = record_verdicts(results, machine)
    if stored is not None:
        verdicts = verdicts_of(results)
        print(
            read_back(verdicts, machine["chip"])
            if chosen.rehearse
            else f"the verdicts are in {stored}"
        )
    if chosen.json:
        content = {"format": FORMAT, "machine": machine}
        if chosen.rehearse:
            content["rehearsal"] = chosen.rehearse
        content["results"] = [dataclasses.asdict(result) for result in results]
        pathlib.Path(chosen.json).write_text(json.dumps(content, indent=1) + "\n")
    if any(result.verdict is Verdict.NOT_RUN for result in results):
        return 2
    return 1 if any(result.verdict.bad for result in results) else 0


def verify(
    cases: list[Case], machine: dict[str, Any], setup: Setup, *, quick: bool
) -> list[Result]:
    """Runs cases, prints a line for each, and returns their results in the same order.

    The verdict of each case is stored as soon as it is known, so that a run that is ended leaves
    what it found.
    """
    found: dict[Case, Result] = {}
    for case in cases:
        if (reason := unsupported(case, machine["platform"], quick=quick)) is not None:
            found[case] = Result(case, Verdict.UNSUPPORTED, reason)
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


def record_verdicts(results: list[Result], machine: dict[str, Any]) -> pathlib.Path | None:
    """Stores verdicts of TPU kernels, and times, where calls without a backend find them; returns
    the file, or None.
    """
    if machine["platform"] != "tpu":
        return None
    verdicts = verdicts_of(results)
    here = trust.Machine.here(machine["chip"] or machine["kind"])
    return trust.record(here, verdicts, times_of(results)) if verdicts else None


def verdicts_of(results: list[Result]) -> dict[str, dict[str, str]]:
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
            right = Verdict.PASS if result.verdict is Verdict.SLOWER else result.verdict
            verdicts.setdefault(trust.key("attention", "flash", 1), {})[case.text] = str(right)
    return verdicts


def times_of(results: list[Result]) -> dict[str, dict[str, float]]:
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


def describe_in_words(machine: dict[str, Any]) -> str:
    """Says what the machine is, in a few lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = (
        [f"a rehearsal for {machine['rehearsal']}, without a TPU"]
        if machine.get("rehearsal")
        else []
    )
    lines += [f"{machine['devices']} x {machine['kind']} ({machine['platform']}); {versions}"]
    if machine["platform"] == "tpu":
        lines.append(machine["ring"])
        if machine["chip"] is None:
            lines.append(describe_unknown(machine["kind"]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
