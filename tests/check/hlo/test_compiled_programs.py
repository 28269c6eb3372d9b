"""Programs that compilers print: jaxlib counts the same, they survive a round trip, and they keep
the rules.
"""

import itertools

import pytest

from flaxasync.check import async_operations, check_async_rules, format_module, parse
from tests.check import programs
from tests.check.jaxlib_counts import counts, counts_of_jaxlib

SLOW = pytest.mark.slow
ALL = (*programs.COLLECTIVES, programs.host)


@pytest.mark.parametrize(
    "topology",
    [
        "v5e:2x4",
        *(pytest.param(name, marks=SLOW) for name in ("v5p:2x2x2", "tpu7x:2x2x1")),
    ],
)
def test_counts_equal_jaxlibs_also_in_what_we_print(topology):
    texts = [programs.compiled(fn, topology).text for fn in ALL]
    modules = [parse(text) for text in texts] * 2
    theirs = counts_of_jaxlib([*texts, *(format_module(module) for module in modules[: len(ALL)])])
    assert [c for c in theirs if c] == [
        counts(m) for m, c in zip(modules, theirs, strict=True) if c
    ]
    aborted = sum(c is None for c in theirs)
    assert aborted == 0 if topology != "tpu7x:2x2x1" else aborted < len(theirs)


def test_counts_on_cpu_equal_jaxlibs():
    texts = [programs.on_cpu(fn) for fn in (programs.ppermute, programs.scan_of_collectives)]
    assert counts_of_jaxlib(texts) == [counts(parse(text)) for text in texts]


@pytest.mark.parametrize(
    ("fn", "topology"),
    [
        *((fn, "v5e:2x4") for fn in ALL),
        (programs.psum, "tpu7x:2x2x1"),  # with operations of the SparseCore
        *(
            pytest.param(*case, marks=SLOW)
            for case in zip(ALL, itertools.cycle(["tpu7x:2x2x1", "v5p:2x2x2"]), strict=False)
            if case != (programs.psum, "tpu7x:2x2x1")
        ),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_a_program_survives_a_round_trip_and_keeps_the_rules(fn, topology):
    """These are the rules of XLA's proposal. auditing/test_hazards.py breaks each of them."""
    module = parse(programs.compiled(fn, topology).text)
    assert module.is_scheduled
    assert parse(format_module(module)) == parse(format_module(module, form="short")) == module
    assert check_async_rules(module) == ()


def test_programs_of_kernel_pairs():
    texts = [programs.async_form(form).text for form in ("value", "stateful", "two_slots")]
    modules = [parse(text) for text in texts]
    assert counts_of_jaxlib(texts) == [counts(module) for module in modules]
    for module in modules:
        assert parse(format_module(module)) == module
        pairs = [op for op in async_operations(module) if op.spelling == "kernel"]
        assert {(op.name.partition(".")[0], bool(op.windows)) for op in pairs} == {
            ("permute_start", True)
        }


def spellings(fn, topology) -> set[tuple[str, str]]:
    return {
        (op.spelling, op.kind)
        for op in async_operations(parse(programs.compiled(fn, topology).text))
    }


def test_spellings_by_compiler():
    assert ("first-class", "collective-permute") in spellings(programs.ppermute, "v5e:2x4")
    assert ("first-class", "copy") in spellings(programs.psum, "v6e:2x4")
    assert ("generic", "custom-call") in spellings(programs.host, "v5e:2x4")
    # on the SparseCore, and bound late
    assert ("generic", "all-reduce") in spellings(programs.psum, "tpu7x:2x2x1")


@SLOW
def test_a_collective_in_a_pair_of_fusions():
    """For v5e, XLA splits a large all-gather into fusions that contain its start, its progress and
    its done.
    """
    operations = async_operations(
        parse(programs.compiled(programs.all_gather_and_matmul, "v5e:2x2", 2048).text)
    )
    fused = [op for op in operations if op.spelling == "fusion"]
    assert [(op.kind, op.communicates, len(op.windows)) for op in fused] == [
        ("all-gather", True, 1)
    ]
    assert fused[0].updates
