"""train/mesh.py: the grid of devices."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.config import InputError, MeshConfig
from train.mesh import fill_in, make_mesh


@given(data=st.integers(1, 64), model=st.integers(1, 64))
def test_either_axis_is_inferred_from_the_other(data, model):
    devices = data * model
    assert fill_in(data, model, devices) == fill_in(-1, model, devices) == fill_in(data, -1, devices) == (data, model)


@given(data=st.integers(-1, 64), model=st.integers(-1, 64), devices=st.integers(1, 64))
def test_a_grid_multiplies_to_the_devices_or_is_refused(data, model, devices):
    try:
        shape = fill_in(data, model, devices)
    except InputError:
        return
    assert shape[0] * shape[1] == devices
    assert min(shape) >= 1


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
def test_a_mesh_that_does_not_fit_is_named(data, model, message):
    with pytest.raises(InputError, match=message):
        make_mesh(MeshConfig(data=data, model=model))


def test_the_mesh_has_explicit_axes_over_all_devices():
    mesh = make_mesh(MeshConfig(data=-1, model=4))
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert mesh.size == len(jax.devices())
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}


def test_another_platform_than_the_one_asked_for_is_refused():
    with pytest.raises(InputError, match=r"mesh.platform=gpu was asked for, but JAX runs on cpu"):
        make_mesh(MeshConfig(platform="gpu"))
