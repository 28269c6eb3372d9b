"""The parity suites of ops and layers on four simulated TPUs, where Pallas kernels start and end
each transfer.
"""

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.nn import conftest as layers
from tests.nn import test_embed as embed
from tests.nn import test_linear as linear
from tests.ops.attention import test_api as ring_attention
from tests.ops.experts import test_experts as experts
from tests.ops.matmul import test_api as ops
from tests.ops.matmul import test_quantized as quantized
from tests.simulator.split_pairs import session


@pytest.fixture(autouse=True, params=["on_wait"])
def simulator(request):
    """Checks that the session ends without a race and with no semaphore or transfer left over."""
    with session(mode=request.param) as report:
        yield
    assert report.problems() == set()


repeats = pytest.mark.slow  # repeats what another test shows for one op, one mode or one size


# Every pair of a mode, a backend and a number of directions.
FORMS = [
    ("on_wait", "pallas", 2),
    ("eager", "pallas", 1),
    ("eager", "stateful", 2),
    ("on_wait", "stateful", 1),
]


@pytest.mark.parametrize(("op", "simulator", "backend", "directions"), [
    pytest.param(op, *form, marks=[] if i + j == 2 else repeats)
    for i, op in enumerate(ops.OPS) for j, form in enumerate(FORMS) if 1 <= i + j <= 3
], indirect=["simulator"])  # fmt: skip
def test_ops(op, backend, directions):
    ops.parity(op, 4, rows=3, batch=2, backend=backend, directions=directions)


@pytest.mark.parametrize(("op", "simulator", "backend", "directions"), [
    pytest.param(op, *form, marks=[] if i + j == 1 and i else repeats)
    for i, op in enumerate(ops.OPS) for j, form in enumerate(FORMS) if i + j in (1, 3)
], indirect=["simulator"])  # fmt: skip
def test_quantised_ops(op, backend, directions):
    """Blocks travel with their scales, forward and backward, and all integer sums are exact."""
    quantized.check_integer_sums(op, 3, backend=backend, directions=directions)


SETTINGS = [
    (4, {"rows": 4, "batch": 1, "dtype": "bfloat16"}),
    *((size, {"rows": 2}) for size in (1, 2, 3)),
    *(
        (2, {"rows": 2, "data": 2, **options})
        for options in ({"axis_type": AxisType.Auto}, {"check_vma": False})
    ),
]


@pytest.mark.parametrize(
    ("op", "setting"),
    [
        pytest.param(op, setting, marks=[] if j in (0, 4) else repeats)
        for i, op in enumerate(ops.OPS)
        for j, setting in enumerate(SETTINGS)
        if (i + j) % 3 == 0
    ],
    ids=str,
)
def test_ops_in_other_settings(op, setting):
    """In bfloat16, on smaller rings, and on one axis of two."""
    size, options = setting
    ops.parity(op, size, backend="pallas", **options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pallas", "stateful"])
def test_a_gated_mlp_under_checkpoint(backend):
    ops.check_gated_mlp(backend, jax.checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["column, rows sharded", "row, rows sharded"])
def test_linear(form):
    make, options, x_spec, y_spec = linear.FORMS[form]
    layer = make(3, backend="pallas", **options)
    layers.check_parity(layer, linear.linear(3), (2, 6, 12), size=3, x_spec=x_spec, y_spec=y_spec)


@pytest.mark.slow
def test_embedding():
    make, plain = embed.embed_pair(3, backend="pallas")
    layers.check_parity(
        make, plain, (2, 6), size=3, x_spec=P("data", None), entries=plain.num_embeddings
    )
    layers.check_parity(
        make, plain, (2, 6, 8), size=3, y_spec=P("data", None, "model"), apply=embed.attend
    )


@pytest.mark.parametrize(
    ("size", "form"),
    [
        (4, {"segments": True}),
        pytest.param(
            3,
            {"layout": "zigzag", "directions": 2, "backend": "stateful", "segments": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            {"layout": "zigzag", "directions": 2, "rows": 16, "head_dim": 16, "dtype": "bfloat16"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_ring_attention(size, form):
    ring_attention.parity(size, **({"backend": "pallas", "kernel": "reference"} | form))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "backend", "directions"), [(4, "stateful", 2), (3, "pallas", 1)], ids=str
)
def test_experts(devices, backend, directions):
    operands = experts.drawn(devices * experts.ROWS, 2 * devices, 2, "zipf")
    found, cotangent = experts.both(
        devices, operands, backend=backend, kernel="reference", directions=directions
    )
    experts.check(found, experts.expected(operands, cotangent))
