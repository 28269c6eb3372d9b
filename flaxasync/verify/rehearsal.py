"""A rehearsal: what a run on a TPU does, without one. `--rehearse v5e:2x4` of the command.

Two things are replaced, both in the child process that runs the cases. Values are those of small
shapes on CPU devices, where kernels run in JAX's simulator; times are those of the compiled program
of the case, in the simulator of compiled programs. Its verdicts are not stored.
"""

from collections import Counter

import jax

from flaxasync import check
from flaxasync.check.player.errors import PlayerError, ProtocolError
from flaxasync.mesh import UnsupportedError
from flaxasync.verify import measure, programs
from flaxasync.verify.cases import FORGETS, Case, stand_in
from flaxasync.verify.measure import Measurement, Timing


def rehearse_case(case: Case, *, repeats: int, topology: str) -> Measurement:
    """Compiles and simulates a case for a topology, and compares the values of its `stand_in`.

    A program that the simulator of compiled programs cannot execute has no time, and one that the
    simulator of kernels cannot execute has no values.

    Raises:
      UnsupportedError: The op cannot serve the case, the compiler refuses its program, or no
        simulator can execute it.
      ProtocolError: The program would hang, halt or corrupt memory on a TPU.
    """
    missing = {}
    timing = None
    try:
        timing = play_case(case, topology)
    except ProtocolError:
        raise
    except PlayerError as error:
        missing["time"] = str(error).partition("\n")[0]
    except NotImplementedError:
        raise
    except RuntimeError as error:
        raise UnsupportedError(str(error)) from error
    small = stand_in(case)
    errors: dict[str, float] = {}
    if case.is_pair:
        if timing is None:
            raise UnsupportedError(f"no simulator executes it: {FORGETS}; {missing['time']}")
        missing["values"] = FORGETS
    else:
        errors = measure.check_values(small, programs.make_program(small), repeats=repeats, runs=1)
    return Measurement(errors, measure.tolerance(small), timing, missing)


def play_case(case: Case, topology: str) -> Timing:
    """Compiles the program of a case in a child process, which opens no TPU, and simulates it."""
    mesh = programs.make_mesh(case, check.topology_devices(topology))
    with jax.set_mesh(mesh):
        program = programs.make_program(case)
        played = check.play(program, *programs.abstract_arguments(case, mesh), topology=topology)
    phases: Counter[str] = Counter()
    for phase in played.slowest.phases:
        phases[phase.name] += phase.seconds  # type: ignore[assignment]
    return Timing(played.seconds, "simulated", dict(phases.most_common(measure.PHASES)))
