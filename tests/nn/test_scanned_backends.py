"""The ring backends for TPUs in models whose layers are scanned and computed again. Tracing needs no TPU."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from flaxasync import check
from flaxasync import mesh as ambient_mesh
from models.transformer import Transformer, TransformerConfig

CONFIG = {"vocab_size": 512, "layers": 2, "width": 512, "heads": 4, "kv_heads": 4, "mlp_width": 512}
KERNELS = {"pallas": "ppermute_start", "stateful": "ppermute_stateful_start"}


def gradient(backend, remat):
    """Returns the value and gradient of a scanned decoder as a function of its parameters and tokens, and both."""
    config = TransformerConfig(**CONFIG, remat=remat)
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, backend=backend, rngs=nnx.Rngs(0))))
    mesh = jax.sharding.get_mesh()
    tokens = jax.ShapeDtypeStruct((8, 512), np.int32, sharding=jax.NamedSharding(mesh, P("data", None)))
    return jax.value_and_grad(lambda params, tokens: nnx.merge(graph, params).loss(tokens, tokens)), params, tokens


@pytest.mark.parametrize("remat", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("none", "dots")), "layer"])
@pytest.mark.parametrize("backend", ["stateful", pytest.param("pallas", marks=pytest.mark.slow)])
def test_a_scanned_model_is_differentiated(monkeypatch, backend, remat):
    monkeypatch.setattr(ambient_mesh, "platform", lambda: "tpu")
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
        loss, params, tokens = gradient(backend, remat)
        jaxpr = str(jax.make_jaxpr(loss)(params, tokens))
    assert KERNELS[backend] in jaxpr


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_a_scanned_model_compiles_for_tpus(remat):
    with jax.set_mesh(check.topology_mesh("v5e:2x4", (2, 4), ("data", "model"))):
        loss, params, tokens = gradient("stateful", remat)
        program = check.compile_for("v5e:2x4", jax.jit(loss), params, tokens, compiler_options=check.HLO_ONLY)
    assert KERNELS["stateful"] in program.as_text()
    assert check.audit(program).ok
