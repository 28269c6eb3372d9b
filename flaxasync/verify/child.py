"""The process that opens the devices and runs cases, started by supervisor.py.

It sends a description of the machine, and then an outcome for each case: {"measurement": {...}}, or "unsupported",
"error" or "not_run" with a message. It may hang or crash at any point: the supervisor knows from what was sent which
case did it.
"""

import dataclasses
import functools
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
from flaxasync.verify import pod
from flaxasync.verify.cases import Case

START_LIMIT = 300
"""Seconds for a child to open the devices."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """How children are started."""

    platform: str | None = None  # what JAX runs on, such as "tpu"; None leaves the choice to JAX
    cpu_devices: int = 4  # that a CPU is divided into
    repeats: int = 3  # on how many random inputs each case runs
    limit: float = 300  # seconds after which a case is ended
    pauses: Sequence[float] = (5, 30, 60)  # seconds to wait before each further attempt to open the devices
    distributed: bool = False  # whether a child joins those of the other hosts of a pod
    rehearse: str | None = None  # a topology, such as "v5e:2x4", for which cases are compiled and simulated, not run
    serve: "Serve" = dataclasses.field(default_factory=lambda: serve)  # what a child does

    @property
    def start_limit(self) -> float:
        """Seconds for a child to open the devices; those of other hosts may first have to reach their time limit."""
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

    run: Callable = functools.partial(rehearse_case, topology=setup.rehearse) if setup.rehearse else run_case
    if setup.distributed:
        pod.join(request.number, setup.start_limit)
    machine = describe_machine(setup.rehearse)
    messages.send(machine)
    if machine["processes"] > 1 and not setup.distributed:
        return  # the parent says how to verify the chips of several machines
    refusal = pod.refusal(request.cases) if setup.distributed else None
    for number, case in enumerate(request.cases):
        if refusal:
            messages.send({"not_run": refusal})
            continue
        outcome: dict[str, Any]
        try:
            outcome = {"measurement": dataclasses.asdict(run(case, repeats=setup.repeats))}
        except UnsupportedError as error:  # other NotImplementedErrors are of the compiler of kernels, and errors
            outcome = {"unsupported": str(error)}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:2000]}
            traceback.print_exc()
        messages.send(pod.share(number, outcome) if setup.distributed else outcome)


def begin(messages: Connection, request: Request) -> None:
    """Makes this process the first of a group, whose output goes to the log, and which ends with its parent.

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
    """Returns what results depend on: the devices, in a rehearsal those of `topology`, their links, and versions."""
    devices = fa.check.topology_devices(topology) if topology else jax.devices()
    device, chip = devices[0], chip_of_device(devices[0].device_kind)
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
