"""benchmarks/plan_layers.py: what is in a sample, what a choice is compared with, and what is played only once."""

import collections
import itertools

import pytest

from benchmarks import plan_layers as benchmark
from benchmarks.plan_layers import Case, Form


def test_a_sample_has_both_layers_on_every_topology():
    for seed in range(5):
        cases = benchmark.sample(seed, benchmark.COUNT)
        strata = collections.Counter((case.layer, case.topology) for case in cases)
        assert len(set(cases)) == len(cases) == benchmark.COUNT
        assert set(strata) == {(layer, topology) for layer in benchmark.LAYERS for topology in benchmark.TOPOLOGIES}
        assert collections.Counter(case.layer for case in cases) == {"attention": 6, "MLP": 6}
    samples = [set(benchmark.sample(seed, benchmark.COUNT)) for seed in range(5)]
    assert all(not one & other for one, other in itertools.combinations(samples, 2))


def test_a_choice_without_memory_is_compared_with_forms_that_keep_nothing():
    played = {Form("none"): 3.0, Form("fused"): 2.0, Form("fused", True): 1.0}
    assert benchmark.behind(2.0, Form(None, False, None), played) == 0
    assert benchmark.behind(2.0, Form(None, True, None), played) == 1
    assert benchmark.behind(0.9, Form(None, True, None), played) == 0  # a choice may mix backends, and be faster


@pytest.mark.slow
def test_a_program_is_played_once(tmp_path, monkeypatch):
    """On short rings and small rows the choice is one of the forms, whose program was played before."""
    plays = []

    def play_program(topology, fn, *arguments, compiler_options):
        plays.append((topology, compiler_options))
        return len(plays), None

    monkeypatch.setattr(benchmark, "play_program", play_program)
    monkeypatch.setattr(benchmark, "seconds_without_exit_copies", lambda result, program: float(result))
    case = Case("MLP", "v5e:2x2", 1, 512, 512)
    forms = [Form("fused"), Form("fused", True), Form("none")]
    seconds = [benchmark.played_seconds(case, form, tmp_path) for form in forms]
    assert seconds == [1, 2, 3]  # a form that keeps rows does so whatever is predicted
    assert [benchmark.played_seconds(case, form, tmp_path) for form in forms] == seconds
    assert benchmark.played_seconds(case, Form(None, False, None), tmp_path) in seconds
    assert [options for _, options in plays] == [benchmark.OPTIONS] * 3


@pytest.mark.parametrize("layer", benchmark.LAYERS)
def test_only_attention_blocks_have_the_forms_in_which_heads_travel(layer):
    exchanged = [form for form in benchmark.forms(Case(layer, "v5e:2x2", 1, 2048, 2048)) if form.exchange]
    assert bool(exchanged) == (layer == "attention")
