"""The errors of misused asynchronous permutes. Tracing is enough; nothing here needs a simulator or
a compiler.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import mesh as ambient_mesh
from flaxasync import transport
from flaxasync.transport import Pair

OPS = fa.all_gather_matmul, fa.matmul_reduce_scatter, fa.matmul_all_reduce


@pytest.fixture
def on_tpu(monkeypatch):
    """Makes the mesh say that it is of TPUs: programs for TPUs can be traced anywhere."""
    monkeypatch.setattr(ambient_mesh, "platform", lambda: "tpu")


def trace(fn):
    """Traces a function of an array [16, 128] that all devices have."""
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))):
        jax.eval_shape(
            jax.shard_map(fn, in_specs=P(), out_specs=P(("x", "y"))), jnp.ones((16, 128))
        )


def start(x, axis_name="x"):
    return fa.ppermute_start(x, axis_name, backend="pallas")


def start_slots(make, slot=0):
    return lambda x: fa.ppermute_start_slots(make(x), slot, "x")


def start_refs(make):
    return lambda x: fa.ppermute_start_stateful(*make(x), "x")


@pytest.mark.parametrize(("call", "instead"), [
    (lambda x: start(x)[0], "backend='xla'"),
    (start_refs(lambda x: (jax.new_ref(x), jax.new_ref(x))), "backend='xla'"),
    (start_slots(lambda x: jax.new_ref(jnp.stack([x, x]))), "backend='xla'"),
    (lambda x: fa.all_gather_matmul(x, x.T, "x", backend="pallas"), "backend='xla'"),
    (lambda x: transport.copy_start(x)[0], "x \\+ 0"),
    (lambda x: transport.slice_start(x, 0)[0], "lax.dynamic_index_in_dim"),
])  # fmt: skip
def test_tpu_kernels_on_another_device_name_what_runs_there(call, instead):
    with pytest.raises(NotImplementedError, match=f"this mesh is of cpu devices; use .*{instead}"):
        trace(call)


NOTHING = Pair("nothing", lambda *_: None, lambda *_: None)


def done_twice(x):
    x, future = start(x)
    return fa.ppermute_done(x, future) + fa.ppermute_done(x, future)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: fa.ppermute(x, "model"),
            "ppermute_start needs the mesh axis 'model' inside jax.shard_map",
        ),
        (
            lambda x: fa.ppermute_start_stateful(jax.new_ref(x), jax.new_ref(x), "model"),
            "ppermute_start_stateful needs the mesh axis 'model'",
        ),
        (
            lambda x: fa.ppermute_done(x, 3),
            "needs the future that ppermute_start returned: got int",
        ),
        (
            lambda x: fa.ppermute_done(x[:8], start(x)[1]),
            r"given float32\[8, 128\] with the future of float32\[16, 128\]",
        ),
        (
            lambda x: fa.ppermute_done(start(x)[0], start(x, "y")[1]),
            r"varies over \['x'\] with the future of one that varies over \['y'\]",
        ),
        (
            lambda x: transport.slice_done(*transport.copy_start(x)),
            "slice_done needs the future that slice_start returned: got one of copy",
        ),
        (
            lambda x: transport.copy_done(*start(x)),
            "needs the future that copy_start returned: got one of ppermute",
        ),
        (
            lambda x: fa.ppermute_done(*transport.copy_start(x)),
            "ppermute_done needs the future that ppermute_start returned: got one of copy",
        ),
        (
            lambda x: Pair("mine", lambda *_: None, lambda *_: None).done(*start(x)),
            "mine_done needs a future of mine_start: got one of ppermute",
        ),
        (
            lambda x: NOTHING.done(x, NOTHING.start((x, x[:8]))[1]),
            r"given float32\[16, 128\] with the future of float32\[16, 128\], float32\[8, 128\]",
        ),
        (done_twice, "waited for before: its semaphores are spent"),
        (
            lambda x: transport.slice_start(x[0], 0)[0],
            r"slice_start needs an array of two dimensions or more: got float32\[128\]",
        ),
        (start_refs(lambda x: (jax.new_ref(x),) * 2), "was given one Ref as x_ref and y_ref"),
        (
            start_refs(lambda x: (jax.new_ref(x), jax.new_ref(x[:8]))),
            r"two Refs of one type: got x_ref float32\[16, 128\] and y_ref float32\[8, 128\]",
        ),
        (start_refs(lambda x: (x, jax.new_ref(x))), "needs x_ref to be a whole Ref"),
        (
            start_refs(lambda x: (jax.new_ref(x[:8]), jax.new_ref(x).at[:8])),
            "needs y_ref to be a whole Ref: got TransformedRef",
        ),
        (
            start_slots(jnp.stack),
            r"needs slots_ref to be a whole Ref \[2, ...\]: got \w+; make one with jax.new_ref",
        ),
        (
            start_slots(jax.new_ref),
            r"to have two slots of one dimension or more.*: got float32\[16, 128\]; make it with",
        ),
        (
            start_slots(lambda x: jax.new_ref(jnp.stack([x, x])), 2),
            "needs slot to be 0 or 1: got 2; give it the parity",
        ),
        (
            lambda x: fa.ppermute_done_slots(0, 0, jax.new_ref(x)),
            "ppermute_done_slots needs slots_ref to have two slots",
        ),
        (
            lambda x: fa.ppermute_start_slots(jax.new_ref(jnp.stack([x, x])), 0, "model"),
            "needs the mesh axis 'model'",
        ),
        *(
            (
                lambda x, op=op: op(x, x.T, "x", backend="pallas", unroll=1),
                "roles every turn(.|\n)*copies one of them while it is in flight",
            )
            for op in OPS
        ),
        *(
            (
                lambda x, op=op: op(x, x.T, "x", backend="stateful", unroll=3),
                "an even(.|\n)*roles every turn",
            )
            for op in OPS
        ),
    ],
)
@pytest.mark.usefixtures("on_tpu")
def test_misuse_is_a_value_error(call, message):
    with pytest.raises(ValueError, match=message):
        trace(call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (
                lambda x, dtype=dtype: start(x.astype(dtype))[0],
                f"ppermute_start: TPU DMAs move .*: got {dtype}; .*, or use backend='xla'$",
            )
            for dtype in ("bool", "float16", "complex64")
        ),
        # what has no backend names something else
        (
            lambda x: fa.copy_start(x.astype(bool))[0],
            r"copy_start: TPU DMAs move .*: got bool; .* before the call, or use x \+ 0$",
        ),
        (
            lambda x: fa.slice_start(x.astype(bool), 0)[0],
            "slice_start: TPU DMAs move .*: got bool; .*, or use lax.dynamic_index_in_dim$",
        ),
        (
            start_slots(lambda x: jax.new_ref(jnp.stack([x, x]).astype(bool))),
            "ppermute_start_slots: .*: got bool; .*, or use ppermute_start with backend=",
        ),
        (
            start_refs(lambda x: (jax.new_ref(x > 0), jax.new_ref(x > 0))),
            "ppermute_start_stateful: .*: got bool; .*, or use ppermute_start with backend=",
        ),
        (
            lambda x: NOTHING.start(x.astype(bool))[0],
            "nothing_start: TPU DMAs move .*: got bool; cast or bitcast it before the call$",
        ),
        (lambda x: start(x[0, 0])[0], "of one dimension or more that are not empty"),
        (lambda x: start(x[:0])[0], "of one dimension or more that are not empty"),
        (
            lambda x: fa.ppermute_start(x, "x", backend="stateful")[0],
            "has no Refs to work on; use ppermute_start_stateful",
        ),
        (lambda x: fa.ppermute(x, "x", backend="carrier pigeon"), "'xla' runs on every device"),
        (
            lambda x: fa.all_gather_matmul(
                x.astype("float16"), x.astype("float16").T, "x", backend="pallas"
            ),
            "got float16; cast or bitcast it before the call, or use backend='xla'",
        ),
    ],
)
@pytest.mark.usefixtures("on_tpu")
def test_what_cannot_be_moved_is_refused(call, message):
    with pytest.raises(NotImplementedError, match=f"(?m){message}"):  # JAX adds lines
        trace(call)


def test_outside_shard_map_the_error_says_where_to_call_it():
    with pytest.raises(
        ValueError, match=r"ppermute_start needs the mesh axis 'x' inside jax.shard_map"
    ):
        fa.ppermute_start(jnp.ones(4), "x")


@pytest.mark.usefixtures("on_tpu")
def test_no_backend_is_the_safe_one():
    def f(x):
        x, future = fa.ppermute_start(x, "x")
        assert isinstance(future, transport.PendingPermute)
        return fa.ppermute_done(x, future)

    trace(f)
