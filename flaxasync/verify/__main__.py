"""Verifies every op on the devices of this machine: are its results right, and how fast is it?

    python -m flaxasync.verify [--quick] [--ops OP[/BACKEND],...] [--json FILE] [--distributed]

The exit status is 0 if everything that is supported is right, 1 if something is wrong, hangs or crashes, and 2 if
nothing could be verified, or not everything because the devices could not be opened again.
"""

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import jax

from flaxasync.hardware import describe_unknown
from flaxasync.ops import trust
from flaxasync.verify.cases import Case, list_cases, unsupported
from flaxasync.verify.supervisor import COMMAND, MachineError, Setup, describe, run_cases
from flaxasync.verify.verdict import Result, Verdict, compare_times, judge, summarize

FORMAT = 1  # of the JSON file


def main(arguments: list[str] | None = None, *, command: tuple[str, ...] = COMMAND) -> int:
    """Runs the command line and returns its exit status; `command` starts a child process."""
    parser = argparse.ArgumentParser(prog="python -m flaxasync.verify", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes; on CPUs also the TPU kernels, simulated")
    parser.add_argument("--ops", default="", help="what to verify, such as all_gather_matmul/fused,attention")
    parser.add_argument("--json", metavar="FILE", help="write everything that was found to a file")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="where JAX must run (default: it chooses)")
    parser.add_argument("--cpu-devices", type=int, default=4, help="devices that a CPU is divided into (default: 4)")
    parser.add_argument("--limit", type=float, help="seconds after which a case hangs (default: 300, quick 90)")
    parser.add_argument("--distributed", action="store_true", help="on a pod: the same command runs on every host")
    chosen = parser.parse_args(arguments)
    setup = Setup(
        platform={"gpu": "cuda"}.get(chosen.platform, chosen.platform),
        cpu_devices=chosen.cpu_devices,
        repeats=1 if chosen.quick else 3,
        limit=chosen.limit or (90 if chosen.quick else 300),
        command=command,
        distributed=chosen.distributed,
    )
    began = time.monotonic()
    if chosen.json:
        try:
            pathlib.Path(chosen.json).open("a").close()  # not after an hour of measurements
        except OSError as error:
            print(f"error: --json cannot be written: {error}", file=sys.stderr)
            return 2
    try:
        only = [name for name in chosen.ops.split(",") if name]
        list_cases("cpu", 1, quick=True, only=only)  # a wrong name is reported before the devices are opened
        machine, rates = describe(setup)
        cases = list_cases(machine["platform"], machine["devices"], quick=chosen.quick, only=only)
    except (MachineError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe_in_words(machine, rates))
    results = verify(cases, machine, setup, quick=chosen.quick)
    print(f"{summarize(results, machine)}\n{time.monotonic() - began:.0f} s")
    stored = record_verdicts(results, machine)
    if stored is not None:
        print(f"the verdicts are in {stored}")
    if chosen.json:
        content = {"format": FORMAT, "machine": machine, "calibration": rates}
        content["results"] = [result.to_json() for result in results]
        pathlib.Path(chosen.json).write_text(json.dumps(content, indent=1) + "\n")
    if any(result.verdict is Verdict.NOT_RUN for result in results):
        return 2
    return 1 if any(result.verdict.bad for result in results) else 0


def verify(cases: list[Case], machine: dict[str, Any], setup: Setup, *, quick: bool) -> list[Result]:
    """Runs cases, prints a line for each, and returns their results in the same order.

    The verdict of each case is stored as soon as it is known, so that a run that is ended leaves what it found.
    """
    reasons = {case: unsupported(case, machine["platform"], quick=quick) for case in cases}
    runnable = [case for case in cases if reasons[case] is None]

    plain: list[Result] = []  # the plain backend of an op runs before the others

    def progress(case: Case, outcome: dict[str, Any]) -> None:
        result = judge(outcome, case)
        if case.plain:
            plain.append(result)
        record_verdicts(compare_times([*plain, result], machine)[-1:], machine)
        if sys.stderr.isatty():
            print(f"\r{runnable.index(case) + 1}/{len(runnable)}  {case.label:60}", end="\r", file=sys.stderr)

    outcomes = dict(zip(runnable, run_cases(runnable, setup, report=progress), strict=True))
    results = [
        Result(case, Verdict.UNSUPPORTED, reason)
        if (reason := reasons[case]) is not None
        else judge(outcomes[case], case)
        for case in cases
    ]
    results = compare_times(results, machine)
    if not quick and machine["platform"] == "tpu":
        jax.config.update("jax_platforms", "cpu")  # this process only compiles, and leaves the chips to others
        from flaxasync.verify.predict import predict, topology_of

        topology = topology_of(machine)
        if topology is not None:
            results = [predict(r, topology) if r.seconds is not None else r for r in results]
    for result in results:
        print(result)
    return results


def record_verdicts(results: list[Result], machine: dict[str, Any]) -> pathlib.Path | None:
    """Stores the verdicts of TPU kernels where calls without a backend find them; returns the file, or None.

    A case of ring attention is stored for the kernel "flash", too, if it used that. Only its results matter there,
    because its time is that of its transfers. A case of one device sends nothing, so it says nothing about a kernel
    that sends, and is not stored.
    """
    if machine["platform"] != "tpu":
        return None
    verdicts: dict[str, dict[str, str]] = {}
    for result in results:
        case = result.case
        alone = case.devices == 1 and case.op != "attention"
        if alone or result.verdict in (Verdict.UNSUPPORTED, Verdict.NOT_RUN):
            continue
        name = json.dumps(case.to_json(), sort_keys=True)
        if case.backend not in trust.PLAIN:
            verdicts.setdefault(trust.key(case.op, case.backend, case.mesh), {})[name] = str(result.verdict)
        if case.takes_flash:
            right = Verdict.PASS if result.verdict is Verdict.SLOWER else result.verdict
            verdicts.setdefault(trust.key("attention", "flash", 1), {})[name] = str(right)
    return trust.record(trust.Machine.here(machine["chip"] or machine["kind"]), verdicts) if verdicts else None


def describe_in_words(machine: dict[str, Any], rates: dict[str, float]) -> str:
    """Says what the machine is, in a few lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    lines = [f"{machine['devices']} x {machine['kind']} ({machine['platform']}); {versions}"]
    if machine["platform"] == "tpu":
        lines.append(machine["ring"])
        if machine["chip"] is None:
            lines.append(describe_unknown(machine["kind"]))
    lines.append("; ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
