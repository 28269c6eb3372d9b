"""Tests of train/dry_run/forms.py and of meshes.py beside it: the form that a run takes, by prediction,
estimates and trust, and what it says about that.
"""

import dataclasses
import functools
import math
import re

import jax
import pytest

import flaxasync as fa
from configs.llama_8b import llama_8b
from configs.llama_70b import llama_70b
from flaxasync.hardware import CHIPS, GPUS
from flaxasync.ops import trust
from train.config import Config, replace_options
from train.dry_run.forms import Estimate, choose
from train.dry_run.meshes import choose_and_say, explains_lack, rank, what_fits
from train.dry_run.prediction import ROOM, with_form
from train.lifecycle.errors import InputError, exit_code

MESH = {"data": 1, "fsdp": 4, "model": 4}
DIRECT = "prefetch_pallas"


def meshes(predictions):
    return [tuple(one.sizes.values()) for one in predictions]


def form_of(choice):
    return choice.config.model.remat, choice.config.model.fsdp_overlap


def large():
    """The 64B decoder of docs/scaling.md, with 192 sequences."""
    options = {
        "model.vocab_size": 32_000,
        "model.layers": 64,
        "model.width": 8192,
        "model.heads": 64,
        "model.kv_heads": 64,
        "model.mlp_width": 28_672,
        "model.dtype": "bfloat16",
        "data.batch_size": 192,
        "data.sequence_length": 2048,
    }
    return replace_options(Config("", 1), options)


@pytest.fixture
def unverified(monkeypatch, tmp_path):
    """A machine that trusts what was verified, which is nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    with trust.trusting("verified"):
        yield


@pytest.mark.parametrize(("chip", "remat"), [("v5e", "attention"), ("v6e", "cheap")])
def test_a_run_takes_the_fastest_form_that_fits(chip, remat):
    choice = choose(llama_8b(), CHIPS[chip], MESH)
    assert form_of(choice) == (remat, DIRECT)
    assert re.fullmatch(
        rf"--model.remat {remat} --model.fsdp_overlap {DIRECT} \(the fastest of 14 forms that "
        rf"fits, by prediction: "
        r"[\d.]+ m?s in [\d.]+ GiB of [\d.]+ GiB\)",
        choice.chosen,
    )
    instead = (
        rf"--model.remat none --model.fsdp_overlap {DIRECT} would take [\d.]+ m?s, but it "
        rf"needs 49\.\d+ GiB"
    )
    assert re.fullmatch(instead, choice.instead)
    assert choose(choice.config, CHIPS[chip], MESH) == dataclasses.replace(
        choice, chosen="", instead=""
    )


@pytest.mark.parametrize(
    ("gib", "remat"),
    [
        (106, "cheap"),
        (100, "dots"),
        (94, "operands"),
        (82, "mlp"),
        (64, "attention"),
        (57, "layer"),
    ],
)
def test_memory_that_is_there_keeps_products(gib, remat):
    """64B on v5p:4x4x4 with three sequences a chip: each step of memory saves products of the
    backward pass, which takes the form that the memory has room for.
    """
    chip = dataclasses.replace(CHIPS["v5p"], hbm_bytes=gib * 2**30)
    choice = choose(large(), chip, {"data": 1, "fsdp": 16, "model": 4})
    assert form_of(choice) == (remat, DIRECT)


def compare(estimates, overlap=None, **chip):
    """Returns the choice for the 64B decoder and the forms that were compiled for it, whose
    estimates are (seconds, GiB) or None, in the order in which they are compiled.
    """
    compiled = []

    def compile_next(config):
        compiled.append((config.model.remat, config.model.fsdp_overlap))
        estimate = estimates[len(compiled) - 1]
        return estimate and Estimate(estimate[0], estimate[1] * 2**30)

    of_chip = dataclasses.replace(CHIPS["v5p"], **chip)
    mesh = {"data": 1, "fsdp": 16, "model": 4}
    config = with_form(large(), None, overlap)
    choice = choose(config, of_chip, mesh, compiled=functools.partial(map, compile_next))
    return choice, compiled


def test_forms_that_are_predicted_close_are_compiled_and_their_estimates_decide(capsys):
    close = [("operands", DIRECT), ("mlp", DIRECT), ("operands", "xla")]
    choice, compiled = compare([(7.31, 87.3), (7.51, 76.0), (7.9, 88)])
    assert (compiled, form_of(choice)) == (close, close[0])
    assert choice.chosen == (
        f"--model.remat operands --model.fsdp_overlap {DIRECT} (the fastest of 3 "
        "compiled: 7.31 s in 87.3 GiB of 95.73 GiB)"
    )
    assert re.search(
        f"none --model.fsdp_overlap {DIRECT} would take .* s, but it needs", choice.instead
    )
    said = capsys.readouterr().out.splitlines()
    assert said[1] == (
        f"compared   --model.remat mlp --model.fsdp_overlap {DIRECT}: 7.51 s in 76 GiB of 95.73 GiB"
    )
    assert len(said) == 3
    # Near the limit of the memory a compiler may lose what a prediction expects,
    assert form_of(compare([(7.6, 87.3), (7.51, 76.0), (7.9, 88)])[0]) == close[1]
    # and a form that needs more than 95 %, or that is refused, is not taken.
    assert form_of(compare([(7.31, 91.0), (7.51, 76.0), (7.9, 88)])[0]) == close[1]
    assert form_of(compare([None, None, (7.9, 88)])[0]) == close[2]
    # If none leaves memory, it is the fastest of those that are predicted to need less,
    refused = compare([None, (7.51, 91.0), None])[0]
    assert form_of(refused) == ("attention", DIRECT)
    why = "one that needs less, as none of 3 compiled ones leaves memory"
    assert f"({why})" in refused.chosen
    # and a form without an estimate leaves the choice to the prediction.
    unread = compare([(math.inf, 87.3), (7.51, 76.0), (7.9, 88)])[0]
    assert form_of(unread) == close[0]
    assert "by prediction: one has no estimate" in unread.chosen


def test_rows_are_kept_if_the_estimate_of_the_program_gains():
    """Each gather of a layer brings 128 MiB of 4 sequences of 4096."""
    seconds = {None: 0.5, 128: 0.4}

    def kept(config):
        def estimate(form):
            return Estimate(seconds[form.model.gathered_mib], 2**30)

        compiled = functools.partial(map, estimate)
        choice = choose(config, CHIPS["v6e"], MESH, compiled=compiled)
        return choice.config.model.gathered_mib, "--model.gathered_mib 128 (" in choice.chosen

    config = llama_8b()
    assert kept(config) == (128, True)
    seconds |= {None: 0.3, 0: 0.3}
    assert kept(config) == (None, False)
    assert kept(replace_options(config, {"model.gathered_mib": 0})) == (0, False)


def test_the_memory_of_the_host_is_used_only_by_a_form_that_was_compiled():
    """70B on 32 chips, each with two sequences of 8192."""
    config = replace_options(llama_70b(), {"data.batch_size": 64, "model.param_dtype": "bfloat16"})
    chip, mesh = CHIPS["v6e"], {"data": 1, "fsdp": 32, "model": 1}
    unknown = dataclasses.replace(chip, host_bandwidth=None)

    def fits(forms):
        return [Estimate(15.0, 2**30)] * len(forms)

    assert form_of(choose(config, chip, mesh)) == ("layer", "xla")
    assert form_of(choose(config, chip, mesh, compiled=fits)) == ("offload_most", "xla")
    assert form_of(choose(config, unknown, mesh, compiled=fits)) == ("layer", "xla")


def test_nothing_is_compiled_where_no_other_form_is_close():
    choice, compiled = compare([], DIRECT, hbm_bytes=57 * 2**30, host_bandwidth=None)
    assert (compiled, form_of(choice)) == ([], ("layer", DIRECT))
    assert "by prediction" in choice.chosen


def test_direct_copies_are_taken_once_they_are_verified(unverified):
    chip = CHIPS["v5e"]
    before = choose(llama_8b(), chip, MESH)
    assert form_of(before) == ("attention", "xla")
    instead = (
        rf"--model.remat attention --model.fsdp_overlap {DIRECT} would take .* s, but it did "
        rf"not pass '{trust.COMMAND}'"
    )
    assert re.fullmatch(instead, before.instead)
    trust.record(trust.Machine.here("v5e"), {"prefetch/pallas/3+": {"a case": "PASS"}})
    assert form_of(choose(llama_8b(), chip, MESH)) == ("attention", DIRECT)
    # a ring of two
    assert form_of(choose(llama_8b(), chip, {"data": 1, "fsdp": 2, "model": 8})) != (
        "layer",
        DIRECT,
    )


def test_what_is_named_stays(unverified):
    for remat, overlap in (
        ("offload", None),
        ("dots", None),
        (None, "prefetch"),
        (None, DIRECT),
        ("none", DIRECT),
    ):
        found = form_of(choose(with_form(llama_8b(), remat, overlap), CHIPS["v6e"], MESH))
        assert (remat or found[0], overlap or found[1]) == found
        assert found[0] == remat or not found[0].startswith("offload")


def test_direct_copies_need_links_and_whole_tiles():
    assert form_of(choose(llama_8b(), CHIPS["v6e"], MESH, linked=False))[1] == "xla"
    narrow = replace_options(llama_8b(), {"model.width": 4096 + 128, "model.head_dim": 128})
    assert form_of(choose(narrow, CHIPS["v6e"], MESH))[1] == "xla"


def test_gradients_are_summed_beside_the_layers_of_a_data_axis():
    config = replace_options(llama_8b(), {"model.layers": 2})
    assert form_of(choose(config, CHIPS["v6e"], {"data": 2, "model": 8})) == ("none", "prefetch")
    assert form_of(choose(config, CHIPS["v6e"], {"data": 1, "model": 8})) == ("none", "xla")


def test_without_predictions_of_time_nothing_is_computed_again(config, mesh, capsys):
    assert choose_and_say(config, mesh) == with_form(config, "none", "xla")
    named = with_form(config, "dots", "xla")
    assert choose_and_say(named, mesh) == named
    assert capsys.readouterr().out == ""


def test_a_run_on_tpus_says_what_it_chose_and_instead_of_what(capsys):
    mesh = fa.check.topology_mesh("v5e:4x4", (1, 4, 4), ("data", "fsdp", "model"))
    with jax.set_mesh(mesh):
        assert choose_and_say(llama_8b(), mesh) == with_form(llama_8b(), "attention", DIRECT)
        chosen, instead = capsys.readouterr().out.splitlines()
        assert chosen.startswith("chosen     --model.remat attention")
        assert instead.startswith("instead    --model.remat none")
        named = with_form(llama_8b(), "dots", "xla")
        assert choose_and_say(named, mesh) == named
    assert capsys.readouterr().out == ""


def test_if_nothing_fits_the_smallest_form_is_taken():
    choice = choose(llama_8b(), CHIPS["v5e"], {"data": 4, "model": 4})
    assert form_of(choice) == ("layer", "xla")
    assert (
        "(the smallest of 14 forms, none fits, by prediction: 1.74 s in 35.48 GiB of 15.75 GiB)"
        in choice.chosen
    )


def test_what_fits_names_a_form_and_a_mesh():
    """It is the fastest one that leaves memory, of all meshes of as many chips."""
    chip, large = CHIPS["v5e"], with_form(llama_8b(), "none", "xla")
    best = "--mesh.data 1 --mesh.fsdp 4 --mesh.context 1 --mesh.model 4 --model.remat attention"
    fits = rf"Predicted to fit into 15.75 GiB: {best} --model.fsdp_overlap {DIRECT} \([\d.]+ GiB\)"
    assert re.fullmatch(fits, what_fits(large, chip, MESH))
    assert re.fullmatch(fits, what_fits(large, chip, {"data": 16, "model": 1}))
    assert what_fits(replace_options(large, {"model.layers": 320}), chip, MESH) == (
        "Nothing is predicted to fit on any mesh: use a smaller data.batch_size, bfloat16 "
        "parameters or more chips"
    )


def test_a_compiler_without_memory_says_what_would_fit(config, mesh, capsys):
    lack = RuntimeError("RESOURCE_EXHAUSTED: no HBM\nmore")
    # no predictions for the CPU
    with pytest.raises(RuntimeError) as same, explains_lack(config, mesh):
        raise lack
    assert same.value is lack
    mesh = fa.check.topology_mesh("v5e:4x4", (1, 4, 4), ("data", "fsdp", "model"))

    def compile_nothing(error):
        with jax.set_mesh(mesh), explains_lack(llama_8b(), mesh):
            raise error

    assert (
        exit_code(lambda: compile_nothing(lack), outcome="Nothing is lost", memory_advice="Do less")
        == 4
    )
    says = (
        r"error: a device has too little memory \(RESOURCE_EXHAUSTED: no HBM\. Predicted to "
        r"fit into 15.75 GiB: --mesh"
    )
    assert re.match(says, capsys.readouterr().err)
    with pytest.raises(RuntimeError, match="a defect"):
        compile_nothing(RuntimeError("a defect"))


def test_meshes_that_fit_come_first_and_those_that_do_not_divide_are_left_out(config, replace):
    ranked = rank(config, CHIPS["v5e"], 8)
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert (8, 1, 1, 1) in meshes(ranked)
    few = meshes(rank(replace(config, data={"batch_size": 4}), CHIPS["v5e"], 8))
    assert (8, 1, 1, 1) not in few
    assert (4, 1, 1, 2) in few
    large = rank(
        replace(config, model={"width": 4096, "mlp_width": 16384, "layers": 12}), CHIPS["v5e"], 8
    )
    fits = [one.fits for one in large]
    assert set(fits) == {True, False}
    assert fits == sorted(fits, reverse=True)


def test_a_refusal_names_a_mesh(config):
    match = (
        r"no mesh of 7 devices divides .*; data x fsdp x context x model = 7 x 1 x 1 x 1 is "
        r"refused because .*batch"
    )
    with pytest.raises(InputError, match=match):
        rank(config, CHIPS["v5e"], 7)


def test_each_mesh_takes_the_fastest_form_that_fits_with_room_to_spare():
    """Of the 8B preset, v6e has the memory for all that is costly, v5e for that of attention, and
    "none" fits neither.
    """
    for chip, remat, fsdp, model in (("v5e", "attention", 4, 4), ("v6e", "cheap", 8, 2)):
        best = rank(llama_8b(), CHIPS[chip], 16)[0]
        assert form_of(best) == (remat, DIRECT)
        assert best.sizes == {"data": 1, "fsdp": fsdp, "context": 1, "model": model}
        assert best == rank(with_form(llama_8b(), remat, DIRECT), CHIPS[chip], 16)[0]
        assert not rank(with_form(llama_8b(), "none", None), CHIPS[chip], 16)[0].fits
    little = dataclasses.replace(CHIPS["v6e"], hbm_bytes=best.needed / ROOM - 1)
    assert best.needed < little.hbm_bytes
    assert form_of(rank(llama_8b(), little, 16)[0])[0] != "cheap"  # it would fit barely


def test_the_ranking_takes_what_is_trusted(unverified):
    assert {form_of(one)[1] for one in rank(llama_8b(), CHIPS["v5e"], 16)} == {"xla"}


@pytest.mark.parametrize(
    ("fsdp", "named", "overlaps"),
    [(1, "prefetch", ["prefetch"]), (8, "xla", ["xla"]), (8, None, ["xla", "prefetch"])],
)
def test_gpus_compare_the_named_overlap_alone(config, fsdp, named, overlaps):
    compiled = []

    def compile_forms(forms):
        compiled.extend(forms)
        return [Estimate(1.0, 2**30)] * len(forms)

    open_form = with_form(config, None, named)
    mesh = {"data": 8 // fsdp, "fsdp": fsdp, "model": 1}
    found = choose(open_form, GPUS["h100"], mesh, compiled=compile_forms)
    assert list(dict.fromkeys(form.model.fsdp_overlap for form in compiled)) == overlaps
    assert found.config.model.fsdp_overlap in overlaps
