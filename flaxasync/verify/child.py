"""The process that opens the devices and runs cases, started by supervisor.py.

It sends a description of the machine, and then an outcome for each case: {"measurement": {...}}, or
"unsupported" or "error" with a message. It may hang or crash at any point: the supervisor knows
from what was sent which case did it.
"""

import dataclasses
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import jax

import flaxasync as fa
from flaxasync.hardware import chip_of_device
from flaxasync.mesh import UnsupportedError
from flaxasync.ops import trust
from flaxasync.verify.cases import Case, Facts

START_LIMIT = 300  # seconds for a child to open the devices


@dataclasses.dataclass(frozen=True)
class Setup:
    """How children are started."""

    platform: str | None = None  # what JAX runs on, such as "tpu"; None leaves the choice to JAX
    cpu_devices: int = 4  # how many devices a CPU is divided into
    repeats: int = 3  # on how many random inputs each case runs
    limit: float = 300  # seconds after which a case is ended
    # seconds to wait before each further attempt to open the devices
    pauses: Sequence[float] = (5, 30, 60)
    # a topology, such as "v5e:2x4", for which cases are compiled and simulated, not run
    rehearse: str | None = None
    serve: "Serve" = dataclasses.field(default_factory=lambda: serve)  # what a child does


@dataclasses.dataclass(frozen=True)
class Request:
    setup: Setup
    cases: tuple[Case, ...]
    log: str  # the file for what it prints


type Serve = Callable[[Connection, Request], None]


def serve(messages: Connection, request: Request) -> None:
    """Serves one request, in a process of its own."""
    begin(messages, request)
    setup = request.setup
    jax.config.update("jax_num_cpu_devices", setup.cpu_devices)
    if setup.rehearse:
        jax.config.update("jax_platforms", "cpu")
    elif setup.platform:
        jax.config.update("jax_platforms", setup.platform)
    machine = describe_machine(setup.rehearse)
    messages.send(machine)
    if machine["processes"] > 1:
        return  # the parent says how to verify the chips of several machines
    for case in request.cases:
        messages.send(run(case, setup))


def run(case: Case, setup: Setup) -> Facts:
    """Runs or rehearses one case, and returns its outcome."""
    from flaxasync.verify.measure import run_case
    from flaxasync.verify.rehearsal import rehearse_case

    try:
        if setup.rehearse:
            measured = rehearse_case(case, repeats=setup.repeats, topology=setup.rehearse)
        else:
            measured = run_case(case, repeats=setup.repeats)
    # other NotImplementedErrors are of the compiler of kernels, and errors
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return {"measurement": dataclasses.asdict(measured)}


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


def describe_machine(topology: str | None = None) -> Facts:
    """Returns what results depend on: the devices, in a rehearsal those of `topology`, their links,
    and versions.
    """
    devices = jax.devices()
    if topology:
        devices = fa.check.topology_devices(topology)
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
