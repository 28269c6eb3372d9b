"""benchmarks/plan_layers.py: what is in a sample, what a choice is compared with, and what is played only once."""

import pytest

from benchmarks import plan_layers as benchmark
from benchmarks.plan_layers import Case, Form


def test_a_choice_without_memory_is_compared_with_forms_that_keep_nothing():
    played = {Form("none"): 3.0, Form("fused"): 2.0, Form("fused", True): 1.0}
    assert benchmark.behind(2.0, Form(None, False, None), played) == 0
    assert benchmark.behind(2.0, Form(None, True, None), played) == 1
    assert benchmark.behind(0.9, Form(None, True, None), played) == 0  # a choice may mix backends, and be faster


@pytest.mark.parametrize("layer", benchmark.LAYERS)
def test_only_attention_blocks_have_the_forms_in_which_heads_travel(layer):
    exchanged = [form for form in benchmark.forms(Case(layer, "v5e:2x2", 1, 2048, 2048)) if form.exchange]
    assert bool(exchanged) == (layer == "attention")
