"""The errors of misused asynchronous permutes. Tracing is enough; nothing here needs a simulator or a compiler."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import mesh as ambient_mesh
from flaxasync import transport
from flaxasync.transport import Pair

LIKE = jnp.ones((16, 128))


@pytest.fixture
def on_tpu(monkeypatch):
    """Makes the mesh say that it is of TPUs: programs for TPUs can be traced anywhere."""
    monkeypatch.setattr(ambient_mesh, "platform", lambda: "tpu")


def trace(fn, *args, shape=(4,), names=("x",)):
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        return jax.eval_shape(jax.shard_map(fn, in_specs=P(), out_specs=P(names)), *(args or (LIKE,)))


def start(x, axis_name="x"):
    return fa.ppermute_start(x, axis_name, backend="pallas")


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda x: fa.ppermute_start(x, "x", backend="pallas")[0], "backend='xla'"),
        (lambda x: fa.ppermute(x, "x", backend="pallas"), "backend='xla'"),
        (lambda x: fa.ppermute_start_stateful(jax.new_ref(x), jax.new_ref(x), "x"), "backend='xla'"),
        (lambda x: fa.all_gather_matmul(x, x.T, "x", backend="pallas"), "backend='xla'"),
        (lambda x: transport.copy_start(x)[0], "x \\+ 0"),
        (lambda x: transport.slice_start(x, 0)[0], "lax.dynamic_index_in_dim"),
    ],
)
def test_tpu_kernels_on_another_device_name_what_runs_there(call, instead):
    with pytest.raises(NotImplementedError, match=f"this mesh is of cpu devices; use .*{instead}"):
        trace(call)


@pytest.mark.usefixtures("on_tpu")
class TestOnTpu:
    def test_an_axis_the_mesh_lacks(self):
        with pytest.raises(ValueError, match="ppermute_start needs the mesh axis 'model'"):
            trace(lambda x: start(x, "model")[0])
        with pytest.raises(ValueError, match="ppermute_start_stateful needs the mesh axis 'model'"):
            trace(lambda x: fa.ppermute_start_stateful(jax.new_ref(x), jax.new_ref(x), "model"))

    def test_a_future_of_another_shape(self):
        with pytest.raises(ValueError, match=r"given float32\[8, 128\] with the future of float32\[16, 128\]"):
            trace(lambda x: fa.ppermute_done(start(x)[0][:8], start(x)[1]))

    def test_a_future_of_another_axis(self):
        def f(x):
            (x, _), (_, other) = start(x, "x"), start(x, "y")
            return fa.ppermute_done(x, other)

        with pytest.raises(
            ValueError, match=r"x that varies over \['x'\] with the future of one that varies over \['y'\]"
        ):
            trace(f, shape=(2, 2), names=("x", "y"))

    def test_a_future_of_another_pair(self):
        def f(x):
            x, future = transport.copy_start(x)
            return transport.slice_done(x, future)

        with pytest.raises(ValueError, match="slice_done needs the future that slice_start returned: got one of copy"):
            trace(f)
        with pytest.raises(
            ValueError, match="copy_done needs the future that copy_start returned: got one of ppermute"
        ):
            trace(lambda x: transport.copy_done(*start(x)))
        pair = Pair("mine", lambda *_: None, lambda *_: None)
        with pytest.raises(ValueError, match="mine_done needs a future of mine_start: got one of ppermute"):
            trace(lambda x: pair.done(*start(x)))

    def test_done_twice(self):
        def f(x):
            x, future = start(x)
            return fa.ppermute_done(x, future) + fa.ppermute_done(x, future)

        with pytest.raises(ValueError, match="waited for before: its semaphores are spent"):
            trace(f)

    def test_done_once_in_each_branch_is_no_second_done(self):
        def f(x):
            x, future = start(x)
            return jax.lax.cond(
                x[0, 0] > 0, lambda: fa.ppermute_done(x, future), lambda: fa.ppermute_done(x, future) * 2
            )

        trace(f)

    @pytest.mark.parametrize("dtype", ["bool", "float16", "complex64"])
    def test_dtypes_that_dmas_cannot_move(self, dtype):
        with pytest.raises(NotImplementedError, match=f"TPU DMAs move .*: got {dtype}; cast or bitcast it"):
            trace(lambda x: start(x)[0], LIKE.astype(dtype))

    @pytest.mark.parametrize("shape", [(), (0, 128)])
    def test_shapes_that_dmas_cannot_move(self, shape):
        with pytest.raises(NotImplementedError, match="of one dimension or more that are not empty"):
            trace(lambda x: start(x)[0], jnp.ones(shape))

    def test_a_slice_needs_two_dimensions(self):
        with pytest.raises(
            ValueError, match=r"slice_start needs an array of two dimensions or more: got float32\[128\]"
        ):
            trace(lambda x: transport.slice_start(x, 0)[0], jnp.ones(128))

    def test_refs_that_do_not_fit(self):
        def refs(make):
            return lambda x: fa.ppermute_start_stateful(*make(x), "x")

        with pytest.raises(ValueError, match="was given one Ref as x_ref and y_ref"):
            trace(refs(lambda x: (jax.new_ref(x),) * 2))
        with pytest.raises(
            ValueError, match=r"two Refs of one type: got x_ref float32\[16, 128\] and y_ref float32\[8, 128\]"
        ):
            trace(refs(lambda x: (jax.new_ref(x), jax.new_ref(x[:8]))))
        with pytest.raises(ValueError, match="needs x_ref to be a whole Ref"):
            trace(refs(lambda x: (x, jax.new_ref(x))))
        with pytest.raises(ValueError, match="needs y_ref to be a whole Ref: got TransformedRef"):
            trace(refs(lambda x: (jax.new_ref(x[:8]), jax.new_ref(x).at[:8])))

    def test_a_permute_of_values_has_no_stateful_backend(self):
        with pytest.raises(NotImplementedError, match="has no Refs to work on; use ppermute_start_stateful"):
            trace(lambda x: fa.ppermute_start(x, "x", backend="stateful")[0])

    @pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
    def test_one_turn_a_body_is_refused_on_every_ring(self, op):
        x = jnp.ones((16, 16))
        for backend, unroll, why in (
            ("pallas", 1, "copies one of them while it is in flight"),
            ("stateful", 3, "even"),
        ):
            with pytest.raises(ValueError, match=f"{why}.*roles every turn|roles every turn(.|\n)*{why}"):
                trace(lambda x: getattr(fa, op)(x, x, "x", backend=backend, unroll=unroll), x)

    def test_the_ops_refuse_what_cannot_be_moved(self):
        x = jnp.ones((16, 16), jnp.float16)
        with pytest.raises(
            NotImplementedError, match="got float16; cast or bitcast it before the call, or use backend='xla'"
        ):
            trace(lambda x: fa.all_gather_matmul(x, x, "x", backend="pallas"), x)


def test_an_unknown_backend():
    with pytest.raises(NotImplementedError, match="'xla' runs on every device"):
        trace(lambda x: fa.ppermute(x, "x", backend="carrier pigeon"))


def test_no_backend_is_the_safe_one():
    x, future = None, None

    def f(y):
        nonlocal x, future
        x, future = fa.ppermute_start(y, "x")
        return fa.ppermute_done(x, future)

    trace(f)
    assert isinstance(future, transport.PendingPermute)
