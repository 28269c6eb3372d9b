"""Tests of train/dry_run/forms.py: the form that a run takes, by prediction and trust, and what it
says about that.
"""

import dataclasses
import re

import jax
import pytest

import flaxasync as fa
from configs.llama_8b import llama_8b
from flaxasync.hardware import CHIPS
from flaxasync.ops import trust
from train.config import replace_options
from train.dry_run.forms import (
    ROOM,
    choose,
    choose_and_say,
    explains_lack,
    rank,
    what_fits,
    with_form,
)
from train.lifecycle.errors import InputError, exit_code

MESH = {"data": 1, "fsdp": 4, "model": 4}
DIRECT = "prefetch_pallas"


def meshes(predictions):
    return [tuple(one.sizes.values()) for one in predictions]


def form_of(choice):
    return choice.config.model.remat, choice.config.model.fsdp_overlap


@pytest.fixture
def unverified(monkeypatch, tmp_path):
    """A machine that trusts what was verified, which is nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    with trust.trusting("verified"):
        yield


@pytest.mark.parametrize(("chip", "remat"), [("v5e", "layer"), ("v6e", "cheap")])
def test_a_run_takes_the_fastest_form_that_fits(chip, remat):
    choice = choose(llama_8b(), CHIPS[chip], MESH)
    assert form_of(choice) == (remat, DIRECT)
    assert re.fullmatch(
        rf"--model.remat {remat} --model.fsdp_overlap {DIRECT} \(the fastest of 12 forms that "
        rf"fits, by prediction: "
        r"[\d.]+ m?s in [\d.]+ GiB of [\d.]+ GiB\)",
        choice.chosen,
    )
    instead = (
        rf"--model.remat none --model.fsdp_overlap {DIRECT} would take [\d.]+ m?s, but it "
        rf"needs 49.3\d GiB"
    )
    assert re.fullmatch(instead, choice.instead)
    assert choose(choice.config, CHIPS[chip], MESH) == dataclasses.replace(
        choice, chosen="", instead=""
    )


def test_direct_copies_are_taken_once_they_are_verified(unverified):
    chip = CHIPS["v5e"]
    before = choose(llama_8b(), chip, MESH)
    assert form_of(before) == ("layer", "xla")
    instead = (
        rf"--model.remat layer --model.fsdp_overlap {DIRECT} would take .* s, but it did "
        rf"not pass '{trust.COMMAND}'"
    )
    assert re.fullmatch(instead, before.instead)
    trust.record(trust.Machine.here("v5e"), {"prefetch/pallas/3+": {"a case": "PASS"}})
    assert form_of(choose(llama_8b(), chip, MESH)) == ("layer", DIRECT)
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
        assert choose_and_say(llama_8b(), mesh) == with_form(llama_8b(), "layer", DIRECT)
        chosen, instead = capsys.readouterr().out.splitlines()
        assert chosen.startswith("chosen     --model.remat layer")
        assert instead.startswith("instead    --model.remat none")
        named = with_form(llama_8b(), "dots", "xla")
        assert choose_and_say(named, mesh) == named
    assert capsys.readouterr().out == ""


def test_if_nothing_fits_the_smallest_form_is_taken():
    choice = choose(llama_8b(), CHIPS["v5e"], {"data": 4, "model": 4})
    assert form_of(choice) == ("layer", "xla")
    assert (
        "(the smallest of 8 forms, none fits, by prediction: 1.84 s in 35.48 GiB of 15.75 GiB)"
        in choice.chosen
    )


def test_what_fits_names_a_form_and_a_mesh():
    chip, large = CHIPS["v5e"], with_form(llama_8b(), "none", "xla")
    form, other = (
        rf"--model.remat layer --model.fsdp_overlap {DIRECT} \([\d.]+ GiB\)",
        "--mesh.data 1 --mesh.fsdp 8 ",
    )
    fits = r"Predicted to fit into 15.75 GiB: "
    there = rf"{other}--mesh.context 1 --mesh.model 2 {form}"
    assert re.fullmatch(rf"{fits}{form}, or {there}", what_fits(large, chip, MESH))
    assert re.fullmatch(rf"{fits}{there}", what_fits(large, chip, {"data": 16, "model": 1}))
    advice = "no form on any mesh; use a smaller data.batch_size, bfloat16 parameters or more chips"
    found = what_fits(replace_options(large, {"model.layers": 320}), chip, MESH)
    assert found == f"Predicted to fit into 15.75 GiB: {advice}"


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
        r"fit into 15.75 GiB: --model"
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
    """Of the 8B preset, v6e has the memory for all that is costly, v5e has not, and "none" fits
    neither.
    """
    for chip, remat in (("v5e", "layer"), ("v6e", "cheap")):
        best = rank(llama_8b(), CHIPS[chip], 16)[0]
        assert (best.remat, best.overlap, best.mesh) == (
            remat,
            DIRECT,
            {"data": 1, "fsdp": 8, "model": 2},
        )
        assert best == rank(with_form(llama_8b(), remat, DIRECT), CHIPS[chip], 16)[0]
        assert not rank(with_form(llama_8b(), "none", None), CHIPS[chip], 16)[0].fits
    little = dataclasses.replace(CHIPS["v6e"], hbm_bytes=best.needed / ROOM - 1)
    assert best.needed < little.hbm_bytes
    assert rank(llama_8b(), little, 16)[0].remat != "cheap"  # it would fit barely


def test_the_ranking_takes_what_is_trusted(unverified):
    assert {one.overlap for one in rank(llama_8b(), CHIPS["v5e"], 16)} == {"xla"}
