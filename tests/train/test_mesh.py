"""Tests of train/mesh.py: the mesh of devices, and what must divide over it."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.config import MeshConfig
from train.errors import InputError
from train.mesh import check_fits_mesh, infer_sizes, make_mesh


@given(data=st.integers(1, 64), model=st.integers(1, 64))
def test_either_axis_is_inferred_from_the_other(data, model):
    devices = data * model
    for sizes in ((data, model), (-1, model), (data, -1)):
        assert infer_sizes(*sizes, devices) == (data, model)


@given(data=st.integers(-1, 64), model=st.integers(-1, 64), devices=st.integers(1, 64))
def test_the_sizes_multiply_to_the_devices_or_are_refused(data, model, devices):
    candidates = [
        (rows, devices // rows)
        for rows in range(1, devices + 1)
        if devices % rows == 0 and data in (-1, rows) and model in (-1, devices // rows)
    ]
    if len(candidates) == 1 and (data, model) != (-1, -1):
        assert infer_sizes(data, model, devices) == candidates[0]
    else:
        with pytest.raises(InputError, match=r"mesh\.(data|model)"):
            infer_sizes(data, model, devices)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (3, 4, "mesh.data=3 x mesh.model=4 must multiply to the number of devices: there are 8 simulated cpu devices"),
        (-1, 3, "mesh.data=-1 x mesh.model=3 must multiply"),
        (-1, 16, "mesh.data=-1 x mesh.model=16 must multiply"),
        (-1, -1, "only one of them can be inferred"),
        (0, 8, "mesh.data must be at least 1, or -1 to infer it: got 0"),
        (8, -2, "mesh.model must be at least 1"),
    ],
)
def test_a_mesh_that_does_not_match_the_devices_is_refused(data, model, message):
    with pytest.raises(InputError, match=message):
        make_mesh(MeshConfig(data=data, model=model))


def test_the_mesh_has_explicit_axes_over_all_devices():
    mesh = make_mesh(MeshConfig(data=-1, model=4))
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert mesh.size == len(jax.devices())
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}


def test_another_platform_than_the_one_asked_for_is_refused():
    with pytest.raises(InputError, match=r"mesh.platform=gpu was requested, but JAX runs on cpu"):
        make_mesh(MeshConfig(platform="gpu"))


def test_a_batch_that_the_data_axis_does_not_divide_is_refused(config, replace):
    check_fits_mesh(config, {"data": 2, "model": 4})
    with pytest.raises(InputError, match=r"data.batch_size must be divisible by the 'data' axis: got 5 on 2 devices"):
        check_fits_mesh(replace(config, data={"batch_size": 5}), {"data": 2, "model": 4})


def test_a_model_that_the_model_axis_does_not_divide_is_refused(config):
    with pytest.raises(InputError, match=r"heads must be divisible by the 'model' axis: got heads=8 on 16 devices"):
        check_fits_mesh(config, {"data": 2, "model": 16})
