"""The process that opens the devices and runs cases, started by supervisor.py.

It sends a description of the machine, and then an outcome for each case: {"measurement": {...}}, or
"unsupported", "error" or "not_run" with a message. It may hang or crash at any point: the
supervisor knows from what was sent which case did it.

The children of several hosts join, check that they run the same cases, and share results. A case
ends on all hosts at once, with the same outcome, so that all of them store the same verdicts and go
on with the same case. That is why a child waits for the others after each case; its parent ends it
if that takes too long.
"""

import dataclasses
import functools
import hashlib
import json
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax

import flaxasync as fa
from flaxasync.hardware import chip_of_device
from flaxasync.mesh import UnsupportedError
from flaxasync.ops import trust
from flaxasync.ops.agreement import exchange
from flaxasync.verify.cases import Case

START_LIMIT = 300  # seconds for a child to open the devices
PORT = 8476  # of the coordinator where nothing names one, as for JAX
SILENT = 30  # seconds without a sign of life after which a child is taken for dead
# seconds: the parent ends a child that waits, after a time limit of its own
OUTCOME_LIMIT = 24 * 3600


@dataclasses.dataclass(frozen=True)
class Setup:
    """How children are started."""

    platform: str | None = None  # what JAX runs on, such as "tpu"; None leaves the choice to JAX
    cpu_devices: int = 4  # how many devices a CPU is divided into
    repeats: int = 3  # on how many random inputs each case runs
    limit: float = 300  # seconds after which a case is ended
    # seconds to wait before each further attempt to open the devices
    pauses: Sequence[float] = (5, 30, 60)
    distributed: bool = False  # whether a child joins those of the other hosts of a pod
    # a topology, such as "v5e:2x4", for which cases are compiled and simulated, not run
    rehearse: str | None = None
    serve: "Serve" = dataclasses.field(default_factory=lambda: serve)  # what a child does

    @property
    def start_limit(self) -> float:
        """Seconds for a child to open the devices; those of other hosts may first have to reach
        their time limit.
        """
        return START_LIMIT + (self.limit if self.distributed else 0)


@dataclasses.dataclass(frozen=True)
class Request:
    setup: Setup
    cases: tuple[Case, ...]
    log: str  # the file for what it prints
    number: int  # how many children this host started before


type Serve = Callable[[Connection, Request], None]


def serve(messages: Connection, request: Request) -> None:
    """Serves one request, in a process of its own."""
    begin(messages, request)
    setup = request.setup
    jax.config.update("jax_num_cpu_devices", setup.cpu_devices)
    if platform := "cpu" if setup.rehearse else setup.platform:
        jax.config.update("jax_platforms", platform)
    from flaxasync.verify.measure import run_case
    from flaxasync.verify.rehearsal import rehearse_case

    run: Callable = (
        functools.partial(rehearse_case, topology=setup.rehearse) if setup.rehearse else run_case
    )
    if setup.distributed:
        join_hosts(request.number, setup.start_limit)
    machine = describe_machine(setup.rehearse)
    messages.send(machine)
    if machine["processes"] > 1 and not setup.distributed:
        return  # the parent says how to verify the chips of several machines
    refused = refusal(request.cases) if setup.distributed else None
    for number, case in enumerate(request.cases):
        if refused:
            messages.send({"not_run": refused})
            continue
        outcome: dict[str, Any]
        try:
            outcome = {"measurement": dataclasses.asdict(run(case, repeats=setup.repeats))}
        except (
            UnsupportedError
        ) as error:  # other NotImplementedErrors are of the compiler of kernels, and errors
            outcome = {"unsupported": str(error)}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:2000]}
            traceback.print_exc()
        messages.send(share(number, outcome) if setup.distributed else outcome)


def begin(messages: Connection, request: Request) -> None:
    """Makes this process the first of a group, whose output goes to the log, and which ends with
    its parent.

    A child that outlived its parent would keep the chips.
    """
    os.setsid()
    log = os.open(request.log, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[trust.VARIABLE] = "all"  # what is verified must not depend on what was

    def end_with_the_parent() -> None:
        try:
            messages.recv()  # nothing is ever sent
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()


def describe_machine(topology: str | None = None) -> dict[str, Any]:
    """Returns what results depend on: the devices, in a rehearsal those of `topology`, their links,
    and versions.
    """
    devices = fa.check.topology_devices(topology) if topology else jax.devices()
    device = devices[0]
    chip = chip_of_device(devices[0].device_kind)
    ring = fa.make_mesh((len(devices),), ("ring",), devices=devices)
    versions = {name: trust.version(name) for name in ("flaxasync", "jax", "jaxlib", "libtpu")}
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "chip": chip.name if chip else None,
        "devices": len(devices),
        "processes": jax.process_count(),
        "ring": str(fa.mesh_report(ring)[0]),
        "rehearsal": topology,
        "versions": {name: version for name, version in versions.items() if version != "none"},
    }


def join_hosts(number: int, limit: float) -> None:
    """Joins the children with this number of the other hosts, as JAX finds them, and waits `limit`
    seconds for them.

    Each number has a port of its own, because a child that hangs still holds its port when other
    hosts start the next.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    host, _, port = (address or f":{os.environ.get('JAX_COORDINATOR_PORT', PORT)}").rpartition(":")
    own_port = str(int(port) + number)
    os.environ["JAX_COORDINATOR_PORT"] = own_port
    try:
        jax.distributed.initialize(
            f"{host}:{own_port}" if address else None,
            initialization_timeout=int(limit),
            heartbeat_timeout_seconds=SILENT,
        )
    except ValueError as error:
        raise SystemExit(
            f"--distributed is for a TPU pod, SLURM or Open MPI, which JAX did not find: {error}"
        ) from error


def refusal(cases: Sequence[Case]) -> str | None:
    """Returns why the hosts cannot run their cases together, the same on all of them; None if all
    have the same.
    """
    texts = exchange("cases", hashlib.sha256(repr(cases).encode()).hexdigest(), OUTCOME_LIMIT)
    if len(set(texts)) == 1:
        return None
    return "the hosts have different cases to run: start the same command on every host"


def share(number: int, outcome: dict[str, Any]) -> dict[str, Any]:
    """Returns the outcome of case `number` on all hosts, from that on this one, when all of them
    have it.
    """
    return combine(
        [
            json.loads(text)
            for text in exchange(f"case {number}", json.dumps(outcome), OUTCOME_LIMIT)
        ]
    )


def combine(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns an error of any host, or what one cannot do, or else the time of the slowest with the
    largest errors.
    """
    for kind in ("error", "unsupported"):
        for process, outcome in enumerate(outcomes):
            if kind in outcome:
                everywhere = all(other == outcome for other in outcomes)
                return (
                    outcome
                    if everywhere
                    else outcome | {kind: f"in process {process}: {outcome[kind]}"}
                )
    measured = [outcome["measurement"] for outcome in outcomes]
    errors = {name: max(one["errors"][name] for one in measured) for name in measured[0]["errors"]}
    slowest = max(measured, key=lambda one: one["timing"]["seconds"] if one["timing"] else 0.0)
    return {"measurement": slowest | {"errors": errors}}
