"""Tests of train/step/mesh.py: the mesh of devices, and what must divide over it."""

import re
from unittest import mock

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxasync as fa
from train.config import MeshConfig
from train.dry_run.command import topology_devices
from train.lifecycle.errors import BAD_INPUT, RESTART, InputError, exit_code
from train.step.mesh import (
    check_fits_mesh,
    check_host_memory,
    infer_sizes,
    make_mesh,
    mesh_over,
    open_model_mesh,
)
from train.step.trainer import Trainer


@given(data=st.integers(-1, 64), model=st.integers(-1, 64), devices=st.integers(1, 64))
def test_the_sizes_multiply_to_the_devices_or_are_refused(data, model, devices):
    candidates = [
        (rows, devices // rows)
        for rows in range(1, devices + 1)
        if devices % rows == 0 and data in (-1, rows) and model in (-1, devices // rows)
    ]
    if len(candidates) == 1 and (data, model) != (-1, -1):
        assert tuple(infer_sizes({"data": data, "model": model}, devices).values()) == candidates[0]
    else:
        with pytest.raises(InputError, match=r"mesh\.(data|model)"):
            infer_sizes({"data": data, "model": model}, devices)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (
            3,
            4,
            "mesh.data=3 x mesh.model=4 must multiply to the number of devices: there are 8 "
            "simulated cpu devices",
        ),
        (-1, 3, "mesh.data=-1 x mesh.model=3 must multiply"),
        (
            -1,
            16,
            "mesh.model=16 .*; change the mesh, or simulate another number with --mesh.platform "
            "cpu --mesh.cpu_",
        ),
        (-1, -1, "only one of them can be inferred"),
        (0, 8, "mesh.data must be at least 1, or -1 to infer it: got 0"),
        (8, -2, "mesh.model must be at least 1"),
    ],
)
def test_a_mesh_that_does_not_match_the_devices_is_refused(data, model, message):
    with pytest.raises(InputError, match=message):
        make_mesh(MeshConfig(data=data, model=model))


def test_the_mesh_has_explicit_axes_over_all_devices_but_those_of_one_device():
    mesh = make_mesh(MeshConfig(data=-1, model=4))
    assert (dict(mesh.shape), mesh.size) == ({"data": 2, "model": 4}, len(jax.devices()))
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}


def test_another_platform_than_the_one_asked_for_is_refused():
    with pytest.raises(InputError, match=r"mesh.platform=gpu was requested, but JAX runs on cpu"):
        make_mesh(MeshConfig(platform="gpu"))


@pytest.mark.parametrize(
    ("sizes", "batch", "parts", "message"),
    [
        ({"data": 2, "model": 4}, 5, 1, "2: got 5; use 4 or 6"),
        ({"data": 2, "fsdp": 2, "model": 2}, 6, 1, "4: got 6; use 4 or 8"),
        ({"data": 2, "model": 4}, 10, 4, "8: got 10; use 8 or 16, or fewer data.microbatches"),
        ({"data": 2, "fsdp": 2, "model": 2}, 8, 4, "16: got 8; use 16, or fewer data.microbatches"),
    ],
)
def test_a_batch_that_does_not_divide_over_the_mesh_is_refused(
    sizes, batch, parts, message, config, replace
):
    changed = replace(config, data={"batch_size": batch, "microbatches": parts})
    with pytest.raises(
        InputError,
        match="data.batch_size must be divisible by mesh.data x mesh.fsdp x data.microbatches = "
        f"{message}$",
    ):
        check_fits_mesh(changed, sizes)
    check_fits_mesh(replace(changed, data={"batch_size": 16}), sizes)


def test_a_model_may_fit_a_mesh_that_batches_and_sequences_do_not(config, replace):
    odd = replace(
        config, data={"batch_size": 5, "sequence_length": 7}, model={"fsdp_overlap": "prefetch"}
    )
    assert open_model_mesh(odd).size == 8
    with pytest.raises(
        InputError, match=r"mlp_width must be divisible by the 'model' axis: got mlp_width=36 on 8"
    ):
        open_model_mesh(replace(odd, mesh={"data": 1, "model": 8}, model={"mlp_width": 36}))


@pytest.mark.parametrize(
    ("overlap", "data", "message"),
    [
        (
            "prefetch",
            1,
            "needs an 'fsdp' or a 'data' axis of 2 devices or more: got 1 and 1; use "
            "fsdp_overlap='xla'",
        ),
        (
            "prefetch_pallas",
            1,
            "needs an 'fsdp' axis of 2 devices or more: got 1; use fsdp_overlap='xla'",
        ),
        (
            "prefetch_pallas",
            2,
            "needs an 'fsdp' axis of 2 devices or more: got 1; use fsdp_overlap='prefetch'",
        ),
    ],
)
def test_a_scan_that_prefetches_needs_an_axis_whose_transfers_it_hides(
    overlap, data, message, config, replace
):
    changed = replace(config, model={"fsdp_overlap": overlap})
    with pytest.raises(InputError, match=f"fsdp_overlap='{overlap}' {message}"):
        check_fits_mesh(changed, {"data": data, "model": 4})
    check_fits_mesh(replace(config, model={"fsdp_overlap": "prefetch"}), {"data": 2, "model": 4})


def test_direct_copies_need_whole_tiles_and_tpus(config, replace):
    model = {"fsdp_overlap": "prefetch_pallas", "remat": "layer"}
    sizes = {"data": 1, "fsdp": 4, "model": 2}
    with pytest.raises(
        InputError, match=r"must be a multiple of 128 x the 'fsdp' axis: got width=16 on 4 devices"
    ):
        check_fits_mesh(replace(config, model=model), sizes)
    wide = replace(config, mesh=sizes, model=model | {"width": 512})
    check_fits_mesh(wide, sizes)
    mesh = make_mesh(wide.mesh)
    with jax.set_mesh(mesh):
        trainer = Trainer(wide, mesh)
        arguments = trainer.abstract_state(), *trainer.abstract_batch()
        with pytest.raises(
            InputError, match=r"this mesh is of cpu devices; use --model\.fsdp_overlap prefetch,"
        ):
            trainer.train_step.eval_shape(*arguments)


def test_offloading_needs_memory_of_the_host(config, replace):
    offloads, mesh = replace(config, model={"remat": "offload_most"}), mock.MagicMock()
    check_host_memory(offloads, make_mesh(config.mesh))
    mesh.local_devices[0].platform = "npu"
    mesh.local_devices[0].addressable_memories.return_value = [mock.Mock(kind="device")]
    check_host_memory(config, mesh)
    message = (
        "model.remat=offload_most needs the memory 'pinned_host' of the host, which npu devices "
        "here lack (they have device); use --model.remat layer, or cheap if memory allows it"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        check_host_memory(offloads, mesh)


def test_a_run_and_its_dry_run_have_the_same_mesh(config, replace, monkeypatch):
    """`jax.make_mesh` would order these devices in another way, which shows that neither takes its
    order from there.
    """
    config = replace(config, mesh={"data": 2, "model": 4, "platform": "auto"})
    devices = fa.check.topology_devices("v5e:2x4")
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(fa.check, "topology_devices", lambda topology: devices)
    mesh = make_mesh(config.mesh)
    assert mesh is mesh_over(topology_devices("v5e:2x4"), config.mesh, "v5e:2x4")
    assert mesh != jax.make_mesh((2, 4), ("data", "model"), devices=devices)


@pytest.mark.parametrize(
    ("distributed", "said", "code"),
    [
        (True, "UNAVAILABLE: Stream removed (Socket closed)", RESTART),
        (True, "DEADLINE_EXCEEDED: GetKeyValue() timed out", RESTART),
        (True, "NOT_FOUND: No device found", BAD_INPUT),
        (False, "UNAVAILABLE: Stream removed (Socket closed)", BAD_INPUT),
    ],
)
def test_another_process_that_ends_while_devices_are_opened_is_no_bad_input(
    config, replace, distributed, said, code, monkeypatch
):
    """A supervisor starts all of them again, and would not after a bad input."""
    config = replace(config, mesh={"distributed": distributed})
    error = RuntimeError(f"Unable to initialize backend 'cpu': {said}")
    monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=error))
    found = exit_code(
        lambda: make_mesh(config.mesh), outcome="", memory_advice="", several_processes=distributed
    )
    assert found == code
