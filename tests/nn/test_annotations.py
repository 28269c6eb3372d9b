"""Annotations of parameters mean what they mean in Flax: logical names with rules, and eager
sharding that is off.
"""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import COLUMNS, ROWS, assert_close, make_fsdp_mesh, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")

RULES = (("embed", ("data", "fsdp")), ("mlp", "model"), ("vocab", "model"), ("unused", None))
INIT = nnx.initializers.ones  # which compiles faster than random numbers


def column(**options):
    options = {"kernel_init": INIT} | options
    return fa.nn.ColumnParallelLinear(8, 16, rngs=nnx.Rngs(0), **options).kernel


def plain(**options):
    return nnx.Linear(8, 16, rngs=nnx.Rngs(0), **{"kernel_init": INIT} | options).kernel


@pytest.mark.parametrize(
    "axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]
)
def test_logical_names_are_resolved_as_flax_resolves_them(axis_type):
    names, rules = {"out_sharding": ("embed", "mlp")}, {"sharding_rules": RULES}
    with jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2, axis_type=axis_type)):
        for options in (
            {"kernel_metadata": names | rules},
            {"kernel_init": nnx.with_partitioning(INIT, ("embed", "mlp"), **rules)},
            {"kernel_metadata": {"out_sharding": ("unused", "mlp")} | rules},
        ):
            want = plain(**options)
            for kernel in (
                column(**options),
                nnx.eval_shape(lambda options=options: column(**options)),
            ):
                assert (
                    nnx.get_partition_spec(kernel).get_value()
                    == nnx.get_partition_spec(want).get_value()
                )
            assert column(**options)[...].sharding == want[...].sharding
        with nnx.logical_axis_rules(RULES):
            assert (
                column(kernel_metadata=names)[...].sharding
                == plain(kernel_metadata=names)[...].sharding
            )
            # the two are swapped
            down = fa.nn.RowParallelLinear(8, 8, kernel_metadata=names, rngs=nnx.Rngs(0))
            assert down.kernel[...].sharding.spec == P("model", ("data", "fsdp"))
            metadata = {"out_sharding": ("vocab", "embed")}
            embed = fa.nn.VocabParallelEmbed(
                8, 8, embedding_metadata=metadata, rngs=nnx.Rngs(0)
            ).embedding
            assert embed[...].sharding.spec == P("model", ("data", "fsdp"))


def test_an_older_name_of_the_annotation():
    """nnx.Variable takes `sharding_names` for `out_sharding`, and warns."""
    with (
        jax.set_mesh(make_mesh(2, 4)),
        pytest.warns(DeprecationWarning, match="use 'out_sharding' instead"),
    ):
        assert column(kernel_metadata={"sharding_names": ("data", "model")})[
            ...
        ].sharding.spec == P("data", "model")


def test_a_name_without_a_rule_is_refused():
    message = (
        r"ColumnParallelLinear: the kernel has out_sharding=\('embed', 'mlp'\), in which "
        r"'embed' is neither an axis"
    )
    with jax.set_mesh(make_mesh(2, 4)), pytest.raises(ValueError, match=message):
        column(kernel_metadata={"out_sharding": ("embed", "mlp")})


@pytest.mark.parametrize(
    "axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]
)
def test_a_layer_is_sharded_where_eager_sharding_is_off(axis_type):
    x = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)

    def make():
        mlp = fa.nn.ParallelMLP(8, 16, rngs=nnx.Rngs(0))
        down = fa.nn.RowParallelLinear(8, 8, rngs=nnx.Rngs(1))
        return nnx.Dict(mlp=mlp, lora=fa.nn.ParallelLoRA(down, 2, rngs=nnx.Rngs(2)))

    with jax.set_mesh(make_mesh(2, 4, axis_type)):
        want = make()
        with nnx.use_eager_sharding(False):
            for model in (make(), nnx.jit(make)()):
                assert model.mlp.up.kernel[...].sharding.spec == P(None, "model")
                assert model.lora.lora_a[...].sharding.is_equivalent_to(
                    want.lora.lora_a[...].sharding, 2
                )
            model, given, split = make(), jax.device_put(x, ROWS), jax.device_put(x, COLUMNS)
            assert_close(model.mlp(given), want.mlp(given), "float32", "mlp")
            assert_close(model.lora(split), want.lora(split), "float32", "lora")


def test_parallelize_leaves_no_rules_behind():
    """The layer is sharded over mesh axes, to which a rule must not be applied again."""
    with jax.set_mesh(make_mesh(2, 4)):
        metadata = {
            "out_sharding": ("embed", "model"),
            "sharding_rules": (("embed", None), ("model", "data")),
        }
        model = nnx.Dict(up=nnx.Linear(8, 16, kernel_metadata=metadata, rngs=nnx.Rngs(0)))
        fa.nn.parallelize(model, {"up": "column"}, verbose=False)
        assert nnx.get_partition_spec(model.up.kernel).get_value() == P(None, "model")
