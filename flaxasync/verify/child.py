"""The process that opens the devices and runs cases, started by supervisor.py.

It sends a description of the machine, and then the result of each case. It may hang or crash at any
point: the supervisor knows from what was sent which case did it.
"""

import dataclasses
import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import jax

import flaxasync as fa
from flaxasync.hardware import chip_of_device
from flaxasync.mesh import UnsupportedError
from flaxasync.ops import trust
from flaxasync.verify.cases import CPU_DEVICES, Case, Facts, unsupported
from flaxasync.verify.measure import run_case
from flaxasync.verify.rehearsal import rehearse_case
from flaxasync.verify.verdict import CaseResult, Verdict, failed

START_LIMIT = 300  # seconds for a child to open the devices


@dataclasses.dataclass(frozen=True)
class Setup:
    """How children are started."""

    platform: str | None = None  # what JAX runs on, such as "tpu"; None leaves the choice to JAX
    limit: float = 300  # seconds after which a case is ended
    # a topology, such as "v5e:2x4", for which cases are compiled and simulated, not run
    rehearse: str | None = None
    serve: "Serve" = dataclasses.field(default_factory=lambda: serve)  # what a child does


type Serve = Callable[[Connection, Setup, tuple[Case, ...], str], None]


def serve(messages: Connection, setup: Setup, cases: tuple[Case, ...], log: str) -> None:
    """Runs cases, in a process of its own, which prints to the file `log`."""
    begin(messages, log)
    platform = setup.platform
    if setup.rehearse:
        platform = "cpu"
    if platform:
        jax.config.update("jax_platforms", platform)
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    machine = describe_machine(setup.rehearse)
    messages.send(machine)
    if machine["processes"] > 1:
        return  # the parent says how to verify the chips of several machines
    for case in cases:
        messages.send(run(case, machine))


def run(case: Case, machine: Facts) -> CaseResult:
    """Runs one case on a machine, or rehearses it."""
    lack = unsupported(case, machine["platform"])
    if lack is not None:
        return CaseResult(case, Verdict.UNSUPPORTED, lack)
    try:
        if machine["rehearsal"]:
            return rehearse_case(case, machine["rehearsal"])
        return run_case(case)
    # other NotImplementedErrors are of the compiler of kernels, and errors
    except UnsupportedError as error:
        return CaseResult(case, Verdict.UNSUPPORTED, str(error))
    except Exception as error:
        traceback.print_exc()
        return failed(case, error)


def begin(messages: Connection, log: str) -> None:
    """Makes this process the first of a group, whose output goes to the log, and which ends with
    its parent.

    A child that outlived its parent would keep the chips.
    """
    os.setsid()
    printed = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
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
    kind = devices[0].device_kind
    chip = chip_of_device(kind)
    ring = fa.make_mesh((len(devices),), ("ring",), devices=devices)
    versions = {name: trust.version(name) for name in ("flaxasync", "jax", "jaxlib", "libtpu")}
    return {
        "platform": devices[0].platform,
        "kind": kind,
        "chip": chip.name if chip else None,
        "devices": len(devices),
        "processes": jax.process_count(),
        "ring": str(fa.mesh_report(ring)[0]),
        "rehearsal": topology,
        "versions": versions,
    }
