"""Tests of the scan that gathers the weights of the next layer while the present one computes."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks import programs
from flaxasync.check import HLO_ONLY
from flaxasync.nn.prefetched_scan import Scan
from flaxasync.transport import direct
from flaxasync.transport.transfers import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from tests.nn.conftest import drawn, make_fsdp_mesh, make_mesh, scan, stack
from tests.simulator.split_pairs import session

pytestmark = pytest.mark.usefixtures("quick_compile")
BATCH = ("data", "fsdp")
ROWS = P(BATCH, "model", None)


def placed(x, spec=ROWS):
    return jax.device_put(x.astype(np.float32), spec)


class Block(nnx.Module):
    """A norm, whose scale every device has, and an MLP with biases."""

    def __init__(self, *, fsdp_axis, dtype, features=16, rngs):
        self.norm = nnx.RMSNorm(features, rngs=rngs)
        self.mlp = fa.nn.ParallelMLP(
            features, 2 * features, use_bias=True, fsdp_axis=fsdp_axis, dtype=dtype, rngs=rngs
        )

    def __call__(self, x, *ids):
        y = self.norm(x)
        for array in ids:
            y = y * array[..., None].astype(y.dtype)
        return x + self.mlp(y).astype(x.dtype)


def blocks(layers, dtype=None, features=16, fsdp_axis="fsdp"):
    return stack(
        lambda rngs: Block(fsdp_axis=fsdp_axis, dtype=dtype, features=features, rngs=rngs), layers
    )


def drawn_blocks(layers, **options):
    return drawn(lambda: blocks(layers, **options))


def prefetch(layers, x, *ids, **options):
    options = {"fsdp_axis": "fsdp", "dtype": jnp.float32} | options
    return fa.nn.scan_with_prefetch(
        lambda layer, x, *ids: layer(x, *ids), layers, x, *ids, **options
    )


class Model(nnx.Module):
    """Layers, and a projection that can be part of their scan."""

    def __init__(self, layers, features=16, fsdp_axis="fsdp"):
        self.layers = blocks(layers, features=features, fsdp_axis=fsdp_axis)
        self.norm = nnx.RMSNorm(features, rngs=nnx.Rngs(1))
        self.output = fa.nn.ColumnParallelLinear(
            features, 2 * features, fsdp_axis=fsdp_axis, rngs=nnx.Rngs(2)
        )


def project(modules, x):
    norm, output = modules
    return output(norm(x))


def projected_after(model, x, *ids):
    return project((model.norm, model.output), scan(model.layers, x, *ids))


def projected_within(model, x, *ids, **options):
    return prefetch(model.layers, x, *ids, then=(project, (model.norm, model.output)), **options)


POLICIES = {
    "costly": fa.save_costly,
    "matmuls": fa.save_matmuls,
    "all": jax.checkpoint_policies.everything_saveable,
    "offload": fa.offload_operands,
    "most": fa.offload_most,
}


def results(text, op):
    """Returns the types of the results of an operation in the text of a lowered program."""
    lines = text.splitlines()
    found = [i for i, line in enumerate(lines) if f"stablehlo.{op}" in line]
    # that of an all_reduce has a body
    closing = (next(line for line in lines[i:] if "->" in line) for i in found)
    return {line.rsplit("->", 1)[1].strip() for line in closing}


@functools.partial(nnx.jit, static_argnames="run")
def gradients(layers, x, *ids, run):
    return nnx.value_and_grad(lambda layers, x: (run(layers, x, *ids) ** 2).sum(), argnums=(0, 1))(
        layers, x
    )


def assert_alike(found, expected, atol):
    """Asserts that losses and gradients, of (model, x), are alike, and parameters' gradients
    sharded alike.
    """
    (loss, (got, dx)), (want_loss, (want, want_dx)) = found, expected
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=atol)
    close(dx, want_dx)
    for (path, one), (_, other) in zip(
        nnx.to_flat_state(got), nnx.to_flat_state(want), strict=True
    ):
        close(one[...], other[...], err_msg=str(path))
        assert one[...].sharding.spec == other[...].sharding.spec, path


@pytest.mark.parametrize(("sizes", "layers", "policy", "then"), [
    ((1, 4, 1, 2), 1, None, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ((1, 1, 1, 4), 2, None, False), ((2, 2, 1, 2), 3, "costly", True),
        ((1, 8, 1, 1), 2, "matmuls", True), ((2, 2, 1, 2), 2, "offload", True),
    ]),
])  # fmt: skip
def test_value_and_gradients_are_those_of_a_plain_scan_and_stay_sharded(
    sizes, layers, policy, then
):
    with jax.set_mesh(make_fsdp_mesh(*sizes)):
        module = drawn(lambda: Model(layers))
        runs = functools.partial(projected_within, policy=POLICIES.get(policy)), projected_after
        if not then:
            module, runs = module.layers, (prefetch, scan)
        x = placed(np.random.default_rng(0).standard_normal((8, 8, 16)))
        ids = jax.device_put((np.arange(64).reshape(8, 8) % 3).astype(np.int32), P(BATCH, "model"))
        assert_alike(
            *(gradients(module, x, ids, run=run) for run in runs), atol=1e-3 if then else 1e-4
        )


@pytest.mark.parametrize(("sizes", "layers", "policy"), [
    ((2, 4), 1, "costly"), pytest.param((4, 2), 3, None, marks=pytest.mark.slow),
])  # fmt: skip
def test_without_an_fsdp_axis_value_and_gradients_are_those_of_a_plain_scan(sizes, layers, policy):
    with jax.set_mesh(make_mesh(*sizes)):
        module = drawn(lambda: Model(layers, fsdp_axis=None))
        x = placed(np.random.default_rng(0).standard_normal((8, 8, 16)), P("data", "model", None))
        ids = jax.device_put((np.arange(64).reshape(8, 8) % 3).astype(np.int32), P("data", "model"))
        within = functools.partial(projected_within, fsdp_axis=None, policy=POLICIES.get(policy))
        assert_alike(
            *(gradients(module, x, ids, run=run) for run in (within, projected_after)), atol=1e-3
        )


def test_two_devices_exchange_gradients_in_the_dtype_of_the_computation():
    """And no all-reduce has the gradient of a kernel, as those of a plain scan have."""
    with jax.set_mesh(make_mesh(2, 4)):
        graph, state = nnx.split(drawn_blocks(3, dtype=jnp.bfloat16, fsdp_axis=None))
        x = placed(np.ones((8, 8, 16)), P("data", "model", None))

        def program(run):
            loss = jax.grad(lambda state, x: (run(nnx.merge(graph, state), x) ** 2).sum())
            return jax.jit(loss).lower(state, x).as_text()

        beside, plain = (
            program(functools.partial(prefetch, fsdp_axis=None, dtype=jnp.bfloat16)),
            program(scan),
        )
    kernels = {"tensor<16x8x", "tensor<8x16x"}  # the shards of gate and up, and of down
    assert {f"{kernel}bf16>" for kernel in kernels} <= results(beside, "collective_permute")
    assert {f"{kernel}f32>" for kernel in kernels} <= results(plain, "all_reduce")
    assert not any(found.startswith(tuple(kernels)) for found in results(beside, "all_reduce"))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_permutes_of_gradients_are_beside_the_backward_pass_of_their_layer(topology):
    """By the schedule of the TPU compiler. The negative test is a plain scan, whose sums are
    synchronous.
    """
    module = schedule(topology, 3, prefetch_in_bfloat16)
    with_products = []
    for operation in permutes_of_gradients(module):
        spans = [span for window in operation.windows for span in window.spans]
        inside = [
            i
            for s in spans
            for i in module.computations[s.computation].instructions[s.first : s.stop]
        ]
        with_products.append(
            any("matmul" in i.op_name or "dot_general" in i.op_name for i in inside)
        )
    assert len(with_products) == 3, "up, gate and down; the loop over layers counts once"
    assert sum(with_products) >= 2, "all but the gradient that is made last travel beside a product"
    assert sums_of_kernels(module) == 0
    assert sums_of_kernels(schedule(topology, 3, scan)) > 0


prefetch_in_bfloat16 = functools.partial(prefetch, fsdp_axis=None, dtype=jnp.bfloat16)


def schedule(topology, layers, run):
    """Returns the program of the gradients of a stack on eight chips, as the TPU compiler
    schedules it.
    """
    mesh = fa.make_mesh((2, 4), ("data", "model"), devices=fa.check.topology_devices(topology))
    with jax.set_mesh(mesh):
        make = functools.partial(blocks, layers, dtype=jnp.bfloat16, features=1024, fsdp_axis=None)
        graph, state = programs.split_layer(make, mesh)
        x = programs.array((8, 2048, 1024), mesh, P("data", "model", None), jnp.float32)
        loss = jax.grad(
            lambda state, x: (run(nnx.merge(graph, state), x).astype(jnp.float32) ** 2).sum()
        )
        program = fa.check.compile_for(topology, jax.jit(loss), state, x, compiler_options=HLO_ONLY)
    return fa.check.parse(program.text)


def permutes_of_gradients(module):
    return [
        operation
        for operation in fa.check.async_operations(module)
        if operation.kind == "collective-permute" and "scatter_gradients" in operation.start.op_name
    ]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(("layers", "most"), [(1, 1), (3, 3)])
def test_outside_of_a_loop_one_sum_follows_the_other(layers, most):
    """The scheduler does not know that they share links. In a loop it may run several at once."""
    module = schedule("v5e:2x4", layers, prefetch_in_bfloat16)
    under_way = []
    for operation in permutes_of_gradients(module):
        (window,) = operation.windows
        (span,) = window.spans
        under_way.append((span.computation, span.first, span.stop))
    at_once = [
        sum(one == place and first <= start < stop for one, first, stop in under_way)
        for place, start, _ in under_way
    ]
    assert len(under_way) == 3, "up, gate and down"
    assert max(at_once) == most


def sums_of_kernels(module):
    """Counts the all-reduces of more than a norm's scale."""
    shapes = [
        shape
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode in ("all-reduce", "all-reduce-start")
        for shape in one.shape.elements or (one.shape,)
    ]
    return sum(np.prod(shape.dimensions) > 16 * 1024 for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["all", "most"])
def test_weights_and_further_arguments_are_not_among_what_is_kept(policy):
    """What the backward pass gathers again, or has anyway, would be kept once for each layer."""
    kept = []
    forward = Scan.forward

    def watch(self, whole, x, args):
        y, found = forward(self, whole, x, args)
        weights = [(w.shape, w.dtype) for w in (*whole, *args) if w.ndim > 1]
        kept.append([a.shape for a in jax.tree.leaves(found) if (a.shape, a.dtype) in weights])
        return y, found

    with jax.set_mesh(make_fsdp_mesh(1, 4, 1, 1)), mock.patch.object(Scan, "forward", watch):
        x = jax.device_put(np.ones((4, 3, 16), np.float32), P("fsdp", None, None))
        ids = jax.device_put(np.ones((4, 3), np.int32), P("fsdp", None))
        gradients(drawn_blocks(2), x, ids, run=functools.partial(prefetch, policy=POLICIES[policy]))
    assert kept == [[]]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "layers", "policy"), [
    ((1, 4, 1, 1), 1, None), ((2, 2, 1, 1), 3, "costly"),
])  # fmt: skip
def test_direct_copies_in_the_simulator(sizes, layers, policy):
    """Four devices with race detection. The up and down projections travel along rows and along
    columns.
    """
    kinds = direct.all_gather, direct.all_to_all
    for kind in kinds:
        kind.cache_clear()
    with jax.set_mesh(make_fsdp_mesh(*sizes)):
        module = Model(layers, features=512)
        x = placed(np.random.default_rng(0).standard_normal((4, 2, 512)), P(BATCH))
        want = jax.tree.map(np.asarray, gradients(module, x, run=projected_after))
        run = functools.partial(projected_within, backend="pallas", policy=POLICIES.get(policy))
        with session(mode="eager", delayed={1: 0.02}) as report:
            got = jax.tree.map(np.asarray, gradients(module, x, run=run))
    assert report.problems() == set()
    assert [kind.cache_info().currsize for kind in kinds] == [2, 2], "along rows and along columns"
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3)
    jax.tree.map(close, got, want)


@pytest.mark.slow
def test_transfers_are_permutes_in_the_dtype_of_the_computation_and_sums_in_that_of_the_parameters():
    """No collective but permutes is over fsdp, except the sum of the gradients of what every device
    has.
    """
    with jax.set_mesh(make_fsdp_mesh(1, 4, 1, 2)):
        graph, state = nnx.split(drawn_blocks(3, dtype=jnp.bfloat16))
        x = jax.device_put(np.ones((8, 8, 16), np.float32), P("fsdp", "model", None))

        def loss(state, x):
            return (prefetch(nnx.merge(graph, state), x, dtype=jnp.bfloat16) ** 2).sum()

        text = jax.jit(jax.grad(loss)).lower(state, x).as_text()
    assert "all_gather" not in text
    assert "reduce_scatter" not in text
    permuted = {
        line.rsplit("->", 1)[1].strip()
        for line in text.splitlines()
        if "collective_permute" in line
    }
    # half of the shard [16 / 4, 32 / 2] of a kernel
    assert {"tensor<2x16xbf16>", "tensor<2x16xf32>"} <= permuted
    reduced = [line for line in text.splitlines() if "all_reduce" in line and "xf32" in line]
    assert not any("32x" in line for line in reduced)


# four devices send 8 rows around; XLA sums what they do not divide
@pytest.mark.parametrize(
    ("size", "rows"), [(2, 2), (4, 8), (4, 3), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_the_sum_of_all_devices_is_the_same_on_each_of_them(size, rows):
    addends = np.random.default_rng(0).standard_normal((size, rows, 3)).astype(np.float32)
    with jax.set_mesh(make_mesh(size, 1)):
        run = jax.shard_map(
            lambda x: ring_all_reduce(x[0], jnp.float32, "data")[0],
            in_specs=P("data"),
            out_specs=P(None, None),
        )
        total = jax.jit(run)(jax.device_put(addends, P("data")))
    first, *others = (np.asarray(shard.data) for shard in total.addressable_shards)
    np.testing.assert_allclose(first, addends.sum(0), rtol=1e-5, atol=1e-5)
    for other in others:
        np.testing.assert_array_equal(other, first)


# halves go both ways; an odd shard goes one way
@pytest.mark.parametrize(
    ("dim", "block"),
    [(0, 4), (1, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, 3), (1, 4)])],
)
def test_the_rings_are_a_gather_and_its_transpose(dim, block):
    shape = [5, 5]
    shape[dim] = 4 * block
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    addends = np.random.default_rng(1).standard_normal((4, *shape)).astype(np.float32)
    spec = P(*("fsdp" if i == dim else None for i in range(2)))
    with jax.set_mesh(make_fsdp_mesh(1, 4, 1, 1)):

        def both(shard, addend):
            return ring_all_gather(shard, "fsdp", dim)[None], ring_reduce_scatter(
                addend[0], "fsdp", dim
            )

        run = jax.jit(jax.shard_map(both, in_specs=(spec, P("fsdp")), out_specs=(P("fsdp"), spec)))
        whole, total = run(jax.device_put(x, spec), jax.device_put(addends, P("fsdp")))
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (4, *shape)))
    np.testing.assert_allclose(total, addends.sum(0), rtol=1e-5, atol=1e-5)


def test_bad_input_is_refused():
    x = np.ones((8, 8, 16), np.float32)
    message = r"reads from types how arrays are sharded: .*make all of them Explicit"
    with (
        jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2, axis_type=AxisType.Auto)),
        pytest.raises(ValueError, match=message),
    ):
        prefetch(nnx.eval_shape(lambda: blocks(2)), x)
    with jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2)):
        layers, counted, sharded = (drawn_blocks(2) for _ in range(3))
        x = placed(x)
        counted.count = nnx.BatchStat(jnp.zeros(2))
        sharded.norm.scale = nnx.Param(placed(np.ones((2, 16)), P("data")))
        for module, args, options, message in [
            (
                layers,
                [x],
                {"fsdp_axis": None, "backend": "pallas"},
                "over an fsdp axis: got fsdp_axis=None; use backe",
            ),
            (
                layers,
                [x],
                {"fsdp_axis": "shards"},
                "works on the mesh axis 'shards', and the mesh has",
            ),
            (
                layers,
                [x],
                {"backend": "stateful"},
                "has the backends 'xla' and 'pallas': got 'stateful'",
            ),
            (
                layers,
                [placed(x, P("data"))],
                {},
                r"over 'fsdp', as a part of the batch: got .*'data'.*; reshard it",
            ),
            (
                layers,
                [x, x[..., 0]],
                {},
                r"must be integers or booleans: got float32\[8, 8\]; make it a parameter",
            ),
            (
                counted,
                [x],
                {},
                "takes layers that have parameters alone: got count, too; use nnx.scan",
            ),
            (
                sharded,
                [x],
                {},
                r"needs all layers of a stack on every device: norm\.scale is stored",
            ),
        ]:
            with pytest.raises(ValueError, match=f"scan_with_prefetch .*{message}"):
                prefetch(module, *args, **options)
        with pytest.raises(
            NotImplementedError,
            match="backend='pallas' is made of TPU kernels, and this mesh is of c",
        ):
            prefetch(layers, x, backend="pallas")
    with pytest.raises(
        ValueError, match=r"scan_with_prefetch needs a mesh, and none is set; .*jax\.set_mesh"
    ):
        prefetch(layers, x, fsdp_axis=None)


@pytest.mark.parametrize("axes", [("data", "fsdp"), ("fsdp", "data")])
def test_the_axis_must_be_the_last_of_a_dimension(axes):
    """A kernel of blocks ordered fsdp x data, gathered over fsdp alone, would be a permutation of
    it.
    """

    def make(rngs):
        return fa.nn.ParallelMLP(
            16, 32, kernel_metadata={"out_sharding": (axes, "model")}, rngs=rngs
        )

    with jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2)):
        module, x = drawn(lambda: stack(make, 2)), placed(np.ones((8, 8, 16)))
        if axes == ("data", "fsdp"):
            got, want = nnx.jit(prefetch)(module, x), nnx.jit(scan)(module, x)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            return
        with pytest.raises(
            ValueError,
            match=r"needs 'fsdp' as the last axis of a dimension: \w+\.kernel is stored P",
        ):
            prefetch(module, x)


@pytest.mark.parametrize("execute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_whose_parameters_every_device_of_their_axis_has(execute):
    """Those of RingSelfAttention. Gathered twice, they would not fit the input."""

    def make():
        return stack(
            lambda rngs: fa.nn.RingSelfAttention(16, 4, use_bias=True, fsdp_axis="fsdp", rngs=rngs),
            2,
        )

    with jax.set_mesh(make_fsdp_mesh(1, 2, 2, 2)):
        x = placed(np.random.default_rng(0).standard_normal((4, 8, 16)), P(BATCH, "context", None))
        if not execute:
            assert nnx.eval_shape(lambda x: prefetch(make(), x), x).shape == x.shape
            return
        module = drawn(make)
        np.testing.assert_allclose(
            nnx.jit(prefetch)(module, x), nnx.jit(scan)(module, x), rtol=1e-5, atol=1e-5
        )
        assert module.query.kernel.get_metadata()["out_sharding"][-2:] == ("fsdp", None)


def test_a_cache_is_refused_until_it_is_dropped():
    def run(x):
        module = stack(
            lambda rngs: fa.nn.ParallelSelfAttention(16, 4, fsdp_axis="fsdp", rngs=rngs), 2
        )
        module.init_cache((2, *x.shape))
        message = "to drop the cache of init_cache, set cached_key, cached_value and cache_i"
        with pytest.raises(ValueError, match=message):
            prefetch(module, x)
        module.cached_key = module.cached_value = module.cache_index = None
        return prefetch(module, x)

    with jax.set_mesh(make_fsdp_mesh(1, 2, 1, 2)):
        x = placed(np.ones((4, 8, 16)), P("fsdp", "model", None))
        assert nnx.eval_shape(run, x).shape == x.shape
