"""Programs that the compilers really print: equal counts with jaxlib's own parser, round trips, rules, both spellings.

jaxlib's parser aborts its process on some of these modules, so it is asked in another one.
"""

import json
import subprocess
import sys

import pytest

from flaxasync.check import async_operations, check_async_rules, format_module, parse, to_long_form, to_sugar
from tests.check import programs

JAXLIB = """
import json, sys
from jaxlib._hlo import hlo_module_from_text
for text in json.load(sys.stdin):
    try:
        computations = hlo_module_from_text(text).computations()
        print(len(computations), sum(len(c.instructions()) for c in computations), flush=True)
    except Exception as error:
        print("refused", str(error)[:200].replace("\\n", " "), flush=True)
"""


def counts_of_jaxlib(texts: list[str]) -> list[tuple[int, int] | None]:
    """Returns (computations, instructions) of each text; None where jaxlib's parser aborts."""
    counts: list[tuple[int, int] | None] = []
    while len(counts) < len(texts):
        rest = json.dumps(texts[len(counts) :])
        done = subprocess.run([sys.executable, "-c", JAXLIB], input=rest, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        assert not any(line.startswith("refused") for line in lines), lines
        counts += [tuple(map(int, line.split())) for line in lines]
        if done.returncode:
            counts.append(None)
    return counts


def counts(module) -> tuple[int, int]:
    """Of the long form: jaxlib's parser writes sugar out when it reads it."""
    long = to_long_form(module)
    return len(long.computations), long.instruction_count


TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_counts_equal_jaxlibs(topology):
    texts = [programs.compiled(fn, topology).text for fn in (*programs.COLLECTIVES, programs.host)]
    modules = [parse(text) for text in texts]
    theirs = counts_of_jaxlib(texts)
    assert [c for c in theirs if c] == [counts(m) for m, c in zip(modules, theirs, strict=True) if c]
    aborted = sum(c is None for c in theirs)
    assert aborted == 0 if topology != "tpu7x:2x2x1" else aborted < len(theirs)


def test_counts_on_cpu_equal_jaxlibs():
    texts = [programs.on_cpu(fn) for fn in programs.COLLECTIVES]
    assert counts_of_jaxlib(texts) == [counts(parse(text)) for text in texts]


def test_jaxlib_reads_what_we_print():
    modules = [parse(programs.compiled(fn, "v5e:2x4").text) for fn in (*programs.COLLECTIVES, programs.host)]
    for form in (lambda m: m, to_long_form):
        assert counts_of_jaxlib([format_module(form(m)) for m in modules]) == [counts(m) for m in modules]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("fn", [*programs.COLLECTIVES, programs.host], ids=lambda fn: fn.__name__)
def test_round_trip(fn, topology):
    module = parse(programs.compiled(fn, topology).text)
    assert module.is_scheduled
    assert parse(format_module(module)) == module


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_real_programs_keep_the_rules(topology):
    """Of the proposal; test_async_rules.py breaks each of them."""
    for fn in (*programs.COLLECTIVES, programs.host):
        assert check_async_rules(parse(programs.compiled(fn, topology).text)) == ()


@pytest.mark.parametrize("topology", ["v5e:2x4", "tpu7x:2x2x1"])
def test_long_form_and_sugar_both_ways(topology):
    for fn in (programs.psum, programs.host, programs.reduce_scatter):
        module = parse(programs.compiled(fn, topology).text)
        long = to_long_form(module)
        assert len(async_operations(long)) == len(async_operations(module))
        assert parse(format_module(to_sugar(long))) == to_sugar(long)


def spellings(fn, topology) -> set[tuple[str, str]]:
    return {(op.spelling, op.kind) for op in async_operations(parse(programs.compiled(fn, topology).text))}


def test_spellings_by_compiler():
    assert ("first-class", "collective-permute") in spellings(programs.ppermute, "v5e:2x4")
    assert ("first-class", "copy") in spellings(programs.psum, "v6e:2x4")
    assert ("sugar", "custom-call") in spellings(programs.host, "v5e:2x4")
    assert ("sugar", "all-reduce") in spellings(programs.psum, "tpu7x:2x2x1")  # offloaded to the SparseCore, bound late


def test_a_collective_in_a_pair_of_fusions():
    """v5e splits a large all-gather into fusions that hold its start, its progress and its done."""
    operations = async_operations(parse(programs.compiled(programs.all_gather_and_matmul, "v5e:2x2", 2048).text))
    fused = [op for op in operations if op.spelling == "fusion"]
    assert [(op.kind, op.communicates, len(op.windows)) for op in fused] == [("all-gather", True, 1)]
    assert fused[0].updates
