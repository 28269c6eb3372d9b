"""What the simulator of compiled programs says about the program of a case, on the chips that were measured."""

import dataclasses
from collections import Counter
from typing import Any

import jax

from flaxasync import check
from flaxasync.check.compile.topologies import TOPOLOGIES
from flaxasync.check.player.errors import PlayerError
from flaxasync.verify import programs
from flaxasync.verify.cases import Case
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

    A program that the simulator cannot execute leaves the result as it is.
    """
    if check.topology_size(topology) != result.case.devices:
        return result
    try:
        seconds, phases = play_case(result.case, topology)
    except (PlayerError, RuntimeError, NotImplementedError):
        return result
    return dataclasses.replace(result, played=seconds, played_phases=phases)


def play_case(case: Case, topology: str) -> tuple[float, dict[str, float]]:
    """Compiles the program of a case in a child process, which opens no TPU, and simulates it.

    Returns:
      Its seconds, and those of its longest instructions on the slowest device.

    Raises:
      RuntimeError: The compiler refused the program.
      PlayerError: The program cannot be simulated, or breaks a rule of the machine.
    """
    mesh = programs.make_mesh(case, check.topology_devices(topology))
    with jax.set_mesh(mesh):
        program = programs.make_program(case)
        played = check.play(program, *programs.abstract_arguments(case, mesh), topology=topology)
    phases: Counter[str] = Counter()
    for phase in played.slowest.phases:
        phases[phase.name] += phase.seconds  # type: ignore[assignment]
    return played.seconds, dict(phases.most_common(40))
