"""The process that opens the devices and runs cases, started by supervisor.py.

It sends a description of the machine, and then an outcome for each case: {"measurement": {...}}, or "unsupported",
"error" or "not_run" with a message. What kernels and libraries print goes to the log. It ends when its parent has
ended, because a child that outlived it would keep the chips. It may hang or crash at any point: the supervisor knows
from what was sent which case did it.
"""

import dataclasses
import functools
import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax

import flaxasync as fa
from flaxasync.hardware import chip_of_device
from flaxasync.mesh import UnsupportedError
from flaxasync.ops import trust
from flaxasync.verify import pod
from flaxasync.verify.cases import Case


@dataclasses.dataclass(frozen=True)
class Request:
    """What a child is to do; see `flaxasync.verify.supervisor.Setup`.

    Attributes:
      log: The file for what it prints.
      number: How many children this host started before, where it joins those of other hosts; otherwise None.
      start_limit: Seconds to wait for the children of other hosts.
    """

    log: str
    platform: str | None
    cpu_devices: int
    repeats: int
    cases: tuple[Case, ...]
    rehearse: str | None
    number: int | None
    start_limit: float


type Serve = Callable[[Connection, Request], None]


def serve(messages: Connection, request: Request) -> None:
    """Serves one request, in a process of its own."""
    begin(messages, request)
    jax.config.update("jax_num_cpu_devices", 4 if request.rehearse else request.cpu_devices)  # as `stand_in` needs
    if platform := "cpu" if request.rehearse else request.platform:
        jax.config.update("jax_platforms", platform)
    from flaxasync.verify.measure import run_case
    from flaxasync.verify.rehearsal import rehearse_case

    run: Callable = functools.partial(rehearse_case, topology=request.rehearse) if request.rehearse else run_case
    distributed = request.number is not None
    if request.number is not None:
        pod.join(request.number, request.start_limit)
    machine = describe_machine(request.rehearse)
    messages.send(machine)
    if machine["processes"] > 1 and not distributed:
        return  # the parent says how to verify the chips of several machines
    refusal = pod.refusal(request.cases) if distributed else None
    for number, case in enumerate(request.cases):
        if refusal:
            messages.send({"not_run": refusal})
            continue
        outcome: dict[str, Any]
        try:
            outcome = {"measurement": dataclasses.asdict(run(case, repeats=request.repeats))}
        except UnsupportedError as error:  # other NotImplementedErrors are of the compiler of kernels, and errors
            outcome = {"unsupported": str(error)}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:2000]}
            traceback.print_exc()
        messages.send(pod.share(number, outcome) if distributed else outcome)


def begin(messages: Connection, request: Request) -> None:
    """Makes this process the first of a group, whose output goes to the log, and which ends with its parent."""
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
    device = devices[0]
    chip = chip_of_device(device.device_kind)
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
