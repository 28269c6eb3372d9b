"""Children of `flaxasync.verify` that compile and simulate every case of a rehearsal, and compare
the values of some cases or of none.

Values are those of small shapes on CPU devices. They depend neither on the topology nor on libtpu,
and those of the fused kernels take longer than all the rest of their cases.
"""

import dataclasses

from flaxasync.verify import cases, child, rehearsal

# The direction of the fused kernels whose values are compared, for (quantization, keeps).
COMPARED = {(None, False): 2, ("int8", False): 1, ("int8", True): 2}


# Kernels that transfer nothing. A device of two computes what one of four does, and each further
# device of the simulator adds rows and experts to all of them.
ALONE = ("flash", "grouped")


def stand_in(case):
    """Returns what `cases.stand_in` returns, on two devices for kernels that transfer nothing."""
    small = cases.stand_in(case)
    if case.backend in ALONE:
        small = dataclasses.replace(small, mesh=(2,))
    return small


def compares_values(case):
    """Says whether `with_few_values` compares the values of a case."""
    if case.is_pair:
        return False
    is_ring = case.backend == "fused" and case.directions is not None
    return not is_ring or case.directions == COMPARED[case.quantization, case.keeps]


def with_few_values(messages, request):
    """Serves a request: each kind of fused product has values in one of its two directions, and
    those of kernels that transfer nothing are compared on two devices.
    """
    run = child.run

    def run_sparingly(case, setup):
        if not compares_values(case):
            setup = dataclasses.replace(setup, repeats=0)
        return run(case, setup)

    child.run = run_sparingly
    rehearsal.stand_in = stand_in
    child.serve(messages, request)


def without_values(messages, request):
    """Serves a request without any values."""
    setup = dataclasses.replace(request.setup, repeats=0)
    child.serve(messages, dataclasses.replace(request, setup=setup))
