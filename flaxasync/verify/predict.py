"""What the simulator of compiled programs says about the program of a case, on the chips that were measured."""

import dataclasses
from collections import Counter
from typing import Any

import jax

from flaxasync import check
from flaxasync.check.compile.topologies import TOPOLOGIES
from flaxasync.check.player.errors import PlayerError
from flaxasync.verify import programs
from flaxasync.verify.verdict import Result


def topology_of(machine: dict[str, Any]) -> str | None:
    """Returns the topology that has exactly the chips of a machine, such as "v5e:2x4"; None if there is none."""
    if machine["chip"] is None or not all(machine["coords"]):
        return None
    sides = [len(set(column)) for column in zip(*machine["coords"], strict=True)]
    known = TOPOLOGIES.get(machine["chip"], ())
    dimensions = len(known[0].split("x")) if known else 0
    size = "x".join(map(str, sides[:dimensions]))
    return f"{machine['chip']}:{size}" if size in known else None


def predict(result: Result, topology: str) -> Result:
    """Returns the result with the simulated time and phases of its program.

    A program that the simulator cannot execute leaves the result as it is. It compiles in a child process of its own,
    which opens no TPU.
    """
    case = result.case
    devices = check.topology_devices(topology)
    if len(devices) != case.devices:
        return result
    mesh = programs.make_mesh(case, devices)
    try:
        with jax.set_mesh(mesh):
            program = programs.make_program(case)
            played = check.play(program, *programs.abstract_arguments(case, mesh), topology=topology)
    except (PlayerError, RuntimeError, NotImplementedError):
        return result
    phases: Counter[str] = Counter()
    for phase in played.slowest.phases:
        phases[phase.name] += phase.seconds  # type: ignore[assignment]
    return dataclasses.replace(result, played=played.seconds, played_phases=dict(phases.most_common(40)))
