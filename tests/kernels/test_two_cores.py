"""Kernels on both cores of a v5p: what each core has, and what is played for them.

That their results are right, without a race, is a case of the tests of each kernel.
"""

import functools
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import hardware
from flaxasync.check import topology_mesh
from flaxasync.check.player.transfers import TransferEngine
from flaxasync.kernels import weight_gradient_schedule
from flaxasync.kernels.all_gather_matmul import all_gather_matmul
from flaxasync.kernels.engine import cores as engine_cores
from flaxasync.kernels.engine.cores import ONE_CORE, CoreRows, Cores, cores_for
from flaxasync.kernels.engine.operands import aligned
from flaxasync.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from flaxasync.kernels.weight_gradient import gather_weight_gradient
from tests.kernels.conftest import arranged, as_float32, assert_close, draw, run, simulated

TOPOLOGY = "v5p:2x2x1"
SIZE = 4
ROWS, COLUMNS = P(None, "ring"), P(None, None, "ring")


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from([8, 16]), st.sampled_from([1, 2]))
def test_cores_have_equally_many_whole_tiles(batches, tiles, unit, directions):
    """With two directions each core has two halves of whole tiles. One core has all rows otherwise."""
    rows = tiles * unit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_cores, "best_cores", lambda chip, length, tile: 2)
        share = CoreRows.of("kernel", batches, rows, unit, directions, None)
    count = share.cores.count
    assert count * share.batches * share.rows == batches * rows
    assert share.rows % unit == 0
    if count == 2:
        assert directions == 1 or share.batches % 2 == 0 or share.rows % (2 * unit) == 0
    else:
        assert batches % 2 == 1 or directions == 2
        assert rows % (2 * directions * unit) or batches % 2 == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: CoreRows.of("kernel", 1, 48, 16, 2, 2),
            r"kernel divides whole tiles of 16 rows among 2 cores, in 2 directions: got 1 x 48 rows; "
            "use cores=1",
        ),
        (
            lambda: weight_gradient_schedule.cores_of(384, 2),
            r"gather_weight_gradient divides whole tiles of 128 columns of x among 2 cores: got 384 "
            "columns; use cores=1",
        ),
    ],
)
def test_what_cores_cannot_share_out_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_only_cores_that_the_chip_has_run_a_kernel():
    with pytest.raises(ValueError, match="kernel runs on 1 of a device's cores: got cores=0"):
        cores_for("kernel", 4096, 0)
    with jax.set_mesh(topology_mesh("v5e:2x2", (4,), ("ring",))):
        assert cores_for("kernel", 4096, None) == cores_for("kernel", 4096, 1) == 1
        with pytest.raises(ValueError, match="runs on 1 of a device's cores: got cores=2"):
            cores_for("kernel", 4096, 2)
    with jax.set_mesh(topology_mesh("v5p:2x2x1", (4,), ("ring",))):
        assert cores_for("kernel", 4096, None) == cores_for("kernel", 4096, 2) == 2
        assert cores_for("kernel", 128, None) == 1
        # 3456 columns are 27 tiles
        assert cores_for("kernel", 3456, None) == 2
        assert cores_for("kernel", 3456, None, 128) == 1
        with pytest.raises(ValueError, match="runs on 1 or 2 of a device's cores: got cores=4"):
            cores_for("kernel", 4096, 4)


def test_one_core_takes_any_number_of_columns():
    assert weight_gradient_schedule.cores_of(200, 1) == ONE_CORE


def test_cores_that_have_the_same_rows_are_seen(monkeypatch):
    """Negative test: the second core works on the rows of the first."""

    def first(self, ref, axis):
        if ref is None:
            return None
        length = ref.shape[axis] // self.count
        return ref.at[*(slice(None),) * axis, aligned(0, length, length)]

    monkeypatch.setattr(Cores, "part", first)
    x, w = draw((1, 2 * 32, 128)), draw((128, 2 * 128), seed=1)
    gather = functools.partial(all_gather_matmul, axis_name="ring", directions=1, cores=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(
            lambda x, w: gather(x, (w,))[0][0],
            (x, w),
            (ROWS, P(None, "ring")),
            COLUMNS,
            shape=(2,),
            cores=2,
        )


@pytest.mark.slow
def test_ops_take_both_cores_and_have_their_gradients():
    """y = reduce_scatter(all_gather(x) @ w1 @ w2) through the public ops: each kernel has a step for
    each core.
    """
    x, do = draw((1, 2 * 256, 256)), draw((1, 2 * 256, 256), seed=1)
    w1, w2 = draw((256, 2 * 256), seed=2), draw((2 * 256, 256), seed=3)
    specs = ROWS, P(None, "ring"), P("ring"), ROWS

    def local(x, w1, w2, do):
        def both(x, w1, w2):
            y = fa.all_gather_matmul(x, w1, "ring", backend="fused")
            return fa.matmul_reduce_scatter(y, w2, "ring", backend="fused")

        y, vjp = jax.vjp(both, x, w1, w2)
        return y, *vjp(do)

    fn = jax.shard_map(local, in_specs=specs, out_specs=(ROWS, *specs[:3]))
    with simulated((2,), ("ring",), cores=2) as mesh:
        placed = [
            jax.device_put(array, NamedSharding(mesh, spec))
            for array, spec in zip((x, w1, w2, do), specs, strict=True)
        ]
        grids = re.findall(r"grid=\((.*?)\)", str(jax.make_jaxpr(fn)(*placed)))
        got = as_float32(jax.jit(fn)(*placed))
    assert len(grids) == 5
    assert set(grids) == {"2,"}
    y, dy = x[0] @ w1, do[0] @ w2.T
    want = (y @ w2)[None], (dy @ w1.T)[None], x[0].T @ dy, y.T @ do[0]
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)


def gather(cores, columns):
    """Returns all_gather(x) @ w on a ring of four, and its operands without values."""
    shapes = [(2, SIZE * 1024, 2048), (2048, SIZE * columns)]

    def local(x, w):
        return all_gather_matmul(x, (w,), "ring", cores=cores)[0][0]

    return local, shapes, (ROWS, P(None, "ring")), COLUMNS


def reduce(cores, columns):
    shapes = [(2, SIZE * 1024, SIZE * columns), (SIZE * columns, 2048)]

    def local(x, w):
        return matmul_reduce_scatter((x,), (w,), "ring", cores=cores)[0]

    return local, shapes, (COLUMNS, P("ring")), ROWS


def differentiate(cores, columns):
    shapes = [(2, SIZE * 1024, 2048), (2, SIZE * 1024, SIZE * columns)]

    def local(x, dy):
        return gather_weight_gradient(x, (dy,), "ring", cores=cores)[0]

    return local, shapes, (ROWS, COLUMNS), P(None, "ring")


def played(kernel, cores, columns):
    """Returns the phase of a kernel on its slowest device, and the bytes that all devices send."""
    mesh = fa.check.topology_mesh(TOPOLOGY, (SIZE,), ("ring",))
    with jax.set_mesh(mesh):
        local, shapes, in_specs, out_specs = kernel(cores, columns)
        fn = jax.jit(jax.shard_map(local, in_specs=in_specs, out_specs=out_specs))
        result = fa.check.play(fn, *arranged(mesh, shapes, in_specs), topology=TOPOLOGY)
    (phase,) = [phase for phase in result.slowest.phases if phase.matrix_busy > 0]
    sent = sum(count for kind, count in phase.bytes.items() if "remote" in kind)
    return phase, sent


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [gather, reduce, differentiate])
def test_both_cores_multiply(kernel):
    """Each core has half of the products, and both together send what one core would."""
    (one, sent_by_one), (two, sent_by_two) = (played(kernel, cores, 4096) for cores in (1, 2))
    products = 2 * 2 * SIZE * 1024 * 2048 * 4096 / hardware.chip("v5p").flops
    assert two.matrix_busy == pytest.approx(one.matrix_busy / 2, rel=0.01)
    assert products <= two.matrix_busy < 1.05 * products
    assert two.seconds < one.seconds / 1.6
    assert sent_by_one == sent_by_two


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_both_cores_send_over_the_same_links(monkeypatch, shared):
    """Where links are the limit, two cores take as long as one. Negative test: if each had links of
    its own, they would not.
    """
    if not shared:
        monkeypatch.setattr(TransferEngine, "_senders", lambda *arguments: 1)
    (one, _), (two, _) = (played(gather, cores, 256) for cores in (1, 2))
    links = 3 * 1024 * 2048 * 2 / hardware.chip("v5p").link_bandwidth
    assert one.seconds > links
    assert (two.seconds > links) is shared
