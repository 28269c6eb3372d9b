"""Ring attention against unsharded attention in float32, and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels.flash_attention import Flash
from flaxasync.ops.attention.blocks import Reference

pytestmark = pytest.mark.usefixtures("quick_compile")

# In float32 only the order of additions differs; bfloat16 keeps 8 bits of p, of ds and of every
# operand.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}


def reference(q, k, v, do, *, causal, window, ids):
    """Returns o, dq, dk and dv from all scores at once, with repeated key-value heads; numpy needs
    no compiling.
    """
    q, k, v, do = (x if x.dtype == np.float64 else np.asarray(x, np.float32) for x in (q, k, v, do))
    rows, groups, scale = (
        q.shape[1],
        q.shape[2] // k.shape[2],
        1 / np.sqrt(q.shape[-1], dtype=q.dtype),
    )
    wide_k, wide_v = (np.repeat(x, groups, axis=2) for x in (k, v))
    distance = np.arange(rows)[:, None] - np.arange(rows)[None]
    allowed = np.ones((1, 1, rows, rows), bool)
    if causal:
        allowed = allowed & (distance >= 0)
    if window is not None:
        allowed = allowed & (np.abs(distance) < window)
    if ids is not None:
        allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = np.where(allowed, np.einsum("bqhd,bkhd->bhqk", q, wide_k) * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bqhd,bkhd->bhqk", do, wide_v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale

    def narrow(x):
        return x.reshape(*k.shape[:3], groups, -1).sum(3)

    return (
        np.einsum("bhqk,bkhd->bqhd", p, wide_v),
        np.einsum("bhqk,bkhd->bqhd", ds, wide_k),
        narrow(np.einsum("bhqk,bqhd->bkhd", ds, q)),
        narrow(np.einsum("bhqk,bqhd->bkhd", p, do)),
    )


def make_mesh(size, data=1, axis_type=AxisType.Explicit):
    return jax.make_mesh(
        (data, size), ("data", "seq"), (axis_type,) * 2, devices=jax.devices()[: data * size]
    )


def parity(
    size, *, rows=4, heads=2, kv_heads=2, head_dim=4, data=1, causal=True, layout="contiguous", window=None,
    segments=False, dtype="float32", axis_type=AxisType.Explicit, check_vma=True, axis_name="seq", **options,
):  # fmt: skip
    """Compares o, dq, dk and dv for a random do."""
    rng = np.random.default_rng(size)
    batch, total = data, size * rows

    def draw(heads):
        return np.asarray(rng.standard_normal((batch, total, heads, head_dim)), jnp.dtype(dtype))

    q, k, v, do = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    ids = np.sort(rng.integers(0, 3, (batch, total)), axis=1).astype(np.int32) if segments else None
    wants = reference(q, k, v, do, causal=causal, window=window, ids=ids)
    order, spec = fa.sequence_order(layout, total, size), P("data", "seq")

    def shards(q, k, v, *ids):
        form = {
            "causal": causal,
            "window": window,
            "segment_ids": ids[0] if ids else None,
        } | options
        if axis_name is None:
            return fa.attention(q, k, v, **form)
        return fa.ring_attention(q, k, v, axis_name, layout=layout, **form)

    @jax.jit
    def both(q, k, v, do, *ids):
        mapped = jax.shard_map(
            shards, in_specs=(spec,) * (3 + len(ids)), out_specs=spec, check_vma=check_vma
        )
        out, vjp = jax.vjp(lambda *qkv: mapped(*qkv, *ids), q, k, v)
        return out, *vjp(do)

    with jax.set_mesh(make_mesh(size, data, axis_type)):
        laid_out = [
            jax.device_put(x[:, order], spec)
            for x in (q, k, v, do, *([] if ids is None else [ids]))
        ]
        gots = both(*laid_out)
    for name, got, want in zip(("o", "dq", "dk", "dv"), gots, wants, strict=True):
        assert got.dtype == jnp.dtype(dtype), name
        got, want = np.asarray(got, want.dtype), want[:, order]
        error = np.abs(got - want).max() / (np.abs(want).max() or 1.0)
        assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(
    "form",
    [
        {"size": 3, "layout": "zigzag", "directions": 2, "heads": 4, "kv_heads": 1},
        {"size": 3, "segments": True, "window": 6, "causal": False, "data": 2, "check_vma": False},
        {"backend": "none", "layout": "zigzag", "segments": True, "window": 6},
        # The rows of one device, in `attention`.
        {
            "size": 1,
            "axis_name": None,
            "rows": 12,
            "heads": 8,
            "segments": True,
            "window": 3,
            "causal": False,
        },
        {
            "size": 1,
            "axis_name": None,
            "rows": 256,
            "window": 100,
            "kernel": Reference(tile=64),
            "data": 2,
        },
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in [
                # Rings of 3 and 8 have two directions, and 8 is the first size with a loop.
                {"size": 8, "directions": 2},
                {"size": 1, "layout": "zigzag"},
                {"size": 2, "window": 1, "data": 2, "axis_type": AxisType.Auto},
                {"rows": 512, "layout": "zigzag", "size": 2, "kernel": Reference(tile=64)},
                {"window": 6, "causal": False, "layout": "zigzag", "segments": True},
                {"window": 5, "layout": "zigzag", "heads": 8, "kv_heads": 1},
                {"size": 3, "rows": 16, "head_dim": 16, "layout": "zigzag", "dtype": "bfloat16"},
                {"size": 3, "rows": 16, "head_dim": 16, "dtype": "bfloat16", "backend": "none"},
            ]
        ),
    ],
    ids=str,
)
def test_every_form(form):
    parity(**({"size": 4} | form))


def test_float64():
    # under x64, integers are of both sizes
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        parity(1, axis_name=None, rows=8, heads=4, dtype="float64")


@dataclasses.dataclass(frozen=True)
class Counting:
    """A block kernel whose output is the number of scores that were computed for each row."""

    name: str = "counting"

    def forward(self, operands, product, carry):
        acc, stats = carry
        rows = jnp.arange(operands.q.shape[-2])
        first = product.q_block * product.q_rows
        here = (rows >= first) & (rows < first + product.q_rows)
        return acc + product.k_rows * jax.lax.broadcast_to_rank(here[:, None], acc.ndim).astype(
            acc.dtype
        ), stats.at[..., 1, :].set(1.0)

    def backward(self, operands, do, rows, product, gradients):
        return gradients


@pytest.mark.parametrize("directions", [1, 2])
def test_products_are_counted_on_the_devices(directions):
    """Counts the products that run, not those that were traced: the branches of masked blocks are
    not taken.
    """

    def work(layout):
        op = functools.partial(
            fa.ring_attention,
            axis_name="seq",
            layout=layout,
            kernel=Counting(),
            directions=directions,
        )
        with jax.set_mesh(make_mesh(4)):
            x, spec = jax.device_put(jnp.ones((1, 4 * 8, 1, 1)), P(None, "seq")), P(None, "seq")
            counts = jax.jit(jax.shard_map(lambda x: op(x, x, x), in_specs=spec, out_specs=spec))(x)
        return np.asarray(counts).reshape(4, 8).sum(axis=1)

    chunk = 4 * 4
    # three products with own rows, two in each hop
    assert work("zigzag").tolist() == [chunk * (3 + 2 * 3)] * 4
    contiguous = work("contiguous")
    assert contiguous[-1] == 4 * 64
    assert len(set(contiguous)) > 1


NOT_HERE = {"error": NotImplementedError}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": "context"}, "needs the mesh axis 'context' inside jax.shard_map"),
        ({"q_shape": (4, 4, 8)}, r"needs q of \[batch, rows, heads, head size\]: got \[4, 4, 8\]"),
        (
            {"k_shape": (1, 6, 4, 8)},
            r"one share of rows .* q \[1, 4, 4, 8\] and k \[1, 6, 4, 8\]; lay both out alike",
        ),
        ({"v_shape": (1, 4, 4, 4)}, "sends k and v as one block of one shape"),
        ({"k_shape": (1, 4, 3, 8)}, "got 4 heads and 3 key-value heads; use a multiple"),
        (
            {"q_shape": (1, 5, 4, 8), "layout": "zigzag"},
            "layout='zigzag' gives each of 4 devices two equal chunks of the sequence: got 20 rows, "
            "needed a multiple of 8; pad the sequence to 24",
        ),
        ({"layout": "striped"}, "layout='striped': it must be one of 'contiguous', 'zigzag'"),
        ({"window": 0}, "window to be 1 or more rows, or None: got 0"),
        ({"directions": 3}, "directions to be 1, 2 or None: got 3"),
        ({"unroll": 0}, "unroll to be 1 or more: got 0"),
        (
            {"backend": "ring"},
            "backend='ring': it must be one of none, xla, pallas, stateful, or None to choose",
        ),
        (
            {"kernel": "splash"},
            "kernel='splash': it must be one of reference, flash, a BlockKernel",
        ),
        ({"dtype": jnp.int32}, "float64, float32, bfloat16 or float16: got int32"),
        ({"ids": jnp.ones((1, 6), jnp.int32)}, r"one segment id a row, \[1, 4\]: got \[1, 6\]"),
        ({"ids": jnp.ones((1, 4))}, "segment ids of an integer dtype: got float32"),
        (
            {"backend": "pallas", **NOT_HERE},
            "ring_attention with backend='pallas' is made of TPU.* use backend='xla'",
        ),
        (
            {"backend": "fused", **NOT_HERE},
            "ring_attention has no 'fused' backend: it has none, xla, .* use backend='xla'",
        ),
        (
            {"kernel": "flash", **NOT_HERE},
            "ring_attention with kernel='flash' is made of TPU.* use kernel='reference'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(options, message):
    def refuse(
        error=ValueError, q_shape=(1, 4, 4, 8), k_shape=None, v_shape=None, dtype=jnp.float32, ids=None,
        axis_name="seq", **options,
    ):  # fmt: skip
        k_shape = k_shape or q_shape
        q, k, v = (jnp.ones(shape, dtype) for shape in (q_shape, k_shape, v_shape or k_shape))
        op = functools.partial(fa.ring_attention, q, k, v, axis_name, segment_ids=ids, **options)
        with jax.set_mesh(make_mesh(4)), pytest.raises(error, match=message):
            jax.eval_shape(jax.shard_map(op, in_specs=(), out_specs=P(None, "seq")))

    refuse(**options)


def test_an_axis_that_is_not_mapped_is_refused():
    x = jnp.ones((2, 8, 4, 8))
    with (
        jax.set_mesh(make_mesh(4, data=2)),
        pytest.raises(ValueError, match=r"leave axis_names out of jax\.shard_map"),
    ):
        jax.shard_map(
            lambda x: fa.ring_attention(x, x, x, "seq"),
            axis_names={"seq"}, in_specs=P(None, "seq"), out_specs=P(None, "seq"),
        )(jax.device_put(x, P("data", "seq")))  # fmt: skip


def norm_of_gradient(attention):
    """Returns a function of q, k and v whose gradient is a second derivative of attention."""

    def loss(*qkv):
        return jnp.sum(jnp.sin(attention(*qkv)))

    return lambda *qkv: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*qkv))


@pytest.mark.parametrize("backend", ["xla", "none"])
def test_a_second_derivative_is_refused(backend):
    op, spec = (
        functools.partial(fa.ring_attention, axis_name="seq", backend=backend),
        P(None, "seq"),
    )
    with jax.set_mesh(make_mesh(4)):
        norm = norm_of_gradient(jax.shard_map(op, in_specs=spec, out_specs=spec))
        x = jax.device_put(jnp.ones((1, 8, 1, 4)), spec)
        assert jax.eval_shape(norm, x, x, x).shape == ()
        for gradient in (jax.grad(norm), jax.jit(jax.grad(norm))):
            with pytest.raises(
                NotImplementedError, match="ring_attention has a first derivative only"
            ):
                gradient(x, x, x)


def test_one_device_has_a_second_derivative():
    """Some scores are far apart, so that exp2 of a masked score would be infinite."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 16, 2, 4)).astype(np.float32) for _ in range(3))
    q[:, 0], k[:, 0], k[:, 1] = (20, 0, 0, 0), (-10, 0, 0, 0), (20, 0, 0, 0)
    ours = functools.partial(fa.attention, window=4)
    theirs = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, local_window_size=(3, 0)
    )
    gots, wants = (
        jax.jit(jax.grad(norm_of_gradient(fn), (0, 1, 2)))(q, k, v) for fn in (ours, theirs)
    )
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


def test_a_kernel_without_a_second_derivative_says_so():
    @dataclasses.dataclass(frozen=True)
    class Mine(Reference):
        name: str = "mine"

    def trace(kernel):
        x = jnp.ones((1, 8, 1, 4))
        return jax.eval_shape(
            jax.grad(norm_of_gradient(functools.partial(fa.attention, kernel=kernel))), x, x, x
        )

    trace(Mine())
    with pytest.raises(
        NotImplementedError, match=r"its gradient is a kernel, .* kernel='reference' has one"
    ):
        trace(Flash(sub_block=8, kv_tile=8, q_tile=8))
