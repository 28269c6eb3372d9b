"""A rehearsal: what a run on a TPU does, without one. `--rehearse v5e:2x4` of the command.

Two things are replaced, both in the child process that runs the cases. Values are those of small
shapes on CPU devices, where kernels run in JAX's simulator; times are those of the compiled program
of the case, in the simulator of compiled programs. Its verdicts are not stored.
"""

import dataclasses

import jax

from flaxasync import check
from flaxasync.check.player.errors import PlayerError, ProtocolError, first_sentence
from flaxasync.mesh import UnsupportedError
from flaxasync.verify import measure, programs
from flaxasync.verify.cases import FORGETS, Case, small
from flaxasync.verify.verdict import CaseResult, judge


def rehearse_case(case: Case, topology: str) -> CaseResult:
    """Compiles and simulates a case for a topology, and compares the values of its `small` one.

    A program that the simulator of compiled programs cannot execute has no time, and one that the
    simulator of kernels cannot execute has no values.

    Raises:
      UnsupportedError: The op cannot serve the case, or no simulator can execute it.
      RuntimeError: The compiler refuses its program.
      ProtocolError: The program would hang, halt or corrupt memory on a TPU.
    """
    seconds = None
    reason = ""
    try:
        seconds = simulated_seconds(case, topology)
    except ProtocolError:
        raise
    except PlayerError as error:
        reason = f"no time: {first_sentence(error)}"
    stand_in = small(case)
    errors: dict[str, float] = {}
    if not case.is_pair:
        errors = measure.run_case(stand_in).errors
    elif seconds is None:
        raise UnsupportedError(f"no simulator executes it: {FORGETS}; {reason}")
    else:
        reason = f"no values: {FORGETS}"
    return dataclasses.replace(judge(stand_in, errors, seconds, reason), case=case)


def simulated_seconds(case: Case, topology: str) -> float:
    """Compiles the program of a case in a child process, which opens no TPU, and simulates it."""
    mesh = programs.make_mesh(case, check.topology_devices(topology))
    with jax.set_mesh(mesh):
        program = programs.make_program(case)
        played = check.play(program, *programs.abstract_arguments(case, mesh), topology=topology)
    return played.seconds
