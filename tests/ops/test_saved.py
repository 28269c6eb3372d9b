"""The policy of `jax.checkpoint` that keeps the results of collective matmuls: nothing that it keeps is repeated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa

pytestmark = pytest.mark.usefixtures("quick_compile")

SIZE, BATCH, ROWS, K, N = 4, 2, 3, 8, 6  # rows, and columns of w or features of x, are those of one device
ROWS_SHARDED, COLUMNS_SHARDED = P(None, "model", None), P(None, None, "model")
KEPT = BATCH * SIZE * ROWS * K * 4  # bytes of the gathered x in float32
# op -> the shapes of x and w, their specs, and the spec of y
OPS = {
    fa.all_gather_matmul: ((SIZE * ROWS, K), (K, SIZE * N), ROWS_SHARDED, P(None, "model"), COLUMNS_SHARDED),
    fa.matmul_reduce_scatter: ((SIZE * ROWS, SIZE * K), (SIZE * K, N), COLUMNS_SHARDED, P("model", None), ROWS_SHARDED),
    fa.matmul_all_reduce: ((ROWS, SIZE * K), (SIZE * K, N), COLUMNS_SHARDED, P("model", None), P()),
}
JAX_POLICY = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@pytest.fixture(autouse=True)
def ring():
    with jax.set_mesh(jax.make_mesh((SIZE,), ("model",), devices=jax.devices()[:SIZE])):
        yield


def loss_of(op, wrap, **options):
    """Returns a loss, which is a function of x and w, and the operands x and w of all devices."""
    x_shape, w_shape, x_spec, w_spec, y_spec = OPS[op]
    rng = np.random.default_rng(3)
    x = jax.device_put(rng.standard_normal((BATCH, *x_shape)).astype(np.float32), x_spec)
    w = jax.device_put(rng.standard_normal(w_shape).astype(np.float32), w_spec)
    fn = jax.shard_map(functools.partial(op, axis_name="model", **options), in_specs=(x_spec, w_spec), out_specs=y_spec)
    return wrap(lambda x, w: jnp.sum(jnp.sin(fn(x, w)) ** 2)), x, w


def with_policy(policy):
    return functools.partial(jax.checkpoint, policy=policy)


def counts(op, wrap, **options):
    """Returns the numbers of matmuls and of transfers in the traced gradient, of which "none" has one for each trip."""
    loss, x, w = loss_of(op, wrap, backend="none", **options)
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))
    return text.count(" dot_general["), sum(map(text.count, (" all_gather[", " reduce_scatter[", " psum_invariant[")))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_neither_products_nor_transfers_are_repeated(op):
    plain = counts(op, lambda loss: loss)
    assert counts(op, with_policy(fa.save_matmuls)) == plain
    assert counts(op, with_policy(jax.checkpoint_policies.nothing_saveable)) == (plain[0] + 1, plain[1] + 1)


def test_policies_that_do_not_ask_for_the_names_are_as_without_them():
    op = fa.all_gather_matmul
    repeated = counts(op, with_policy(None))
    assert counts(op, with_policy(JAX_POLICY)) == repeated
    assert counts(op, with_policy(jax.checkpoint_policies.save_only_these_names("another"))) == repeated


@pytest.mark.parametrize(("limit", "trips"), [(0, 3), (KEPT, 2)])
def test_gathered_rows_are_kept_with_the_product(limit, trips):
    """x travels for y and, unless its gathered rows are kept, for dw; the sums of dx make the other trip."""
    op = fa.all_gather_matmul
    assert counts(op, with_policy(fa.save_matmuls), gathered_bytes=limit)[1] == trips
    assert counts(op, with_policy(JAX_POLICY), gathered_bytes=limit)[1] == trips + 1  # negative test
    rows = KEPT // 4 * SIZE if limit else KEPT // 4  # of all devices together
    for policy, more in ((fa.save_matmuls, [BATCH * SIZE * ROWS * SIZE * N]), (JAX_POLICY, [])):
        loss, x, w = loss_of(op, with_policy(policy), gathered_bytes=limit)
        saved = jax.tree.leaves(jax.eval_shape(lambda *xs, loss=loss: jax.vjp(loss, *xs)[1], x, w))
        kept = [rows if more else x.size, w.size, *more]
        assert sorted(leaf.size for leaf in saved if leaf.size > 1) == sorted(kept)


def test_matmuls_that_are_none_of_ours_are_kept_as_by_the_policy_of_jax():
    x = jnp.ones((4, 4))

    def matmuls(policy):
        loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x @ x) @ x)), policy=policy)
        return str(jax.make_jaxpr(jax.grad(loss))(x)).count("dot_general")

    assert matmuls(fa.save_matmuls) == matmuls(JAX_POLICY) < matmuls(None)


@pytest.mark.parametrize("backend", ["xla", "none"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_gradients_are_those_of_the_loss_without_a_checkpoint(op, backend):
    gradients = []
    for wrap in (lambda loss: loss, with_policy(fa.save_matmuls)):
        loss, x, w = loss_of(op, wrap, backend=backend)
        gradients.append(jax.jit(jax.grad(loss, (0, 1)))(x, w))
    for name, want, got in zip(("dx", "dw"), *gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=name)
