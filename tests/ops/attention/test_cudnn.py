"""When attention is that of cuDNN: on a mesh of NVIDIA's GPUs, where the library can serve."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array
from flaxasync import check, mesh
from flaxasync.kernels.attention_block import Mask, Scores
from flaxasync.ops.attention import api, cudnn

CALL = "__cudnn$fmhaSoftmax"


def described(dtype="bfloat16", head=128):
    return jax.ShapeDtypeStruct((2, 64, 4, head), jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", [Mask(True, None), Mask(False, None), Mask(True, 16)])
def test_what_it_serves(dtype, mask):
    assert cudnn.unsupported(described(dtype), mask, None, None) is None


@pytest.mark.parametrize(
    ("q", "options", "limit"),
    [
        (described("float32"), {}, "bfloat16 and float16: got float32"),
        (described(head=4), {}, "multiple of 8 features, up to 128: got 4"),
        (described(head=256), {}, "multiple of 8 features, up to 128: got 256"),
        (described(), {"segment_ids": jnp.zeros((2, 64), int)}, "one segment: got segment_ids"),
        (described(), {"mask": Mask(False, 8)}, "causal attention alone: got causal=False"),
        (described(), {"precision": "highest"}, "default precision: got precision=highest"),
    ],
)
def test_what_it_does_not_serve(q, options, limit):
    arguments = {"mask": Mask(True, None), "segment_ids": None, "precision": None} | options
    assert limit in cudnn.unsupported(q, **arguments)


def attend(topology, devices, dtype=jnp.bfloat16, **options):
    """Compiles attention on a topology, heads over "model", and returns the text."""
    found = check.topology_mesh(topology, (devices,), ("model",))
    heads = P(None, None, "model")
    x = array((2, 256, 8, 64), found, heads, dtype)
    with jax.set_mesh(found):
        mapped = jax.shard_map(
            lambda q: fa.attention(q, q, q, **options), in_specs=(heads,), out_specs=heads
        )
        return check.compile_for(topology, mapped, x).text


def test_it_is_chosen_on_gpus_and_for_calls_that_it_can_serve():
    assert CALL in attend("h100:2", 2)
    assert CALL not in attend("h100:2", 2, jnp.float32)
    assert CALL not in attend("h100:2", 2, kernel="reference")


def test_it_is_named_where_it_can_serve_and_refused_elsewhere():
    assert '"mask_type": "NO_MASK"' in attend("h100:2", 2, kernel="cudnn", causal=False)
    with pytest.raises(NotImplementedError, match="takes bfloat16 and float16: got float32"):
        attend("h100:2", 2, jnp.float32, kernel="cudnn")
    q = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="NVIDIA's GPUs: got a mesh of unknown"):
        fa.attention(q, q, q, kernel="cudnn")


def test_it_is_among_the_names_of_an_error():
    q = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
    with pytest.raises(
        ValueError, match="it must be one of reference, flash, cudnn, a BlockKernel"
    ):
        fa.attention(q, q, q, kernel="splash")


def test_it_has_no_place_in_a_ring():
    found = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    q = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
    with jax.set_mesh(found), pytest.raises(NotImplementedError, match="whole sequences"):
        jax.shard_map(
            lambda q: fa.ring_attention(q, q, q, "context", kernel="cudnn"),
            in_specs=P(),
            out_specs=P(None, "context"),
        )(q)


def test_a_gpu_that_the_table_lacks_gets_it_only_by_name(monkeypatch):
    """A T4 or V100 cannot run it, and a call that names nothing must run."""
    q = described()
    scores = Scores(Mask(True, None), 1.0, None)
    monkeypatch.setattr(mesh, "platform", lambda: "gpu")
    monkeypatch.setattr(mesh, "chip_name", lambda: "NVIDIA Tesla T4")
    monkeypatch.setattr(mesh, "gpu", lambda: None)
    assert not api._takes_cudnn(None, q, None, scores)
    assert api._takes_cudnn("cudnn", q, None, scores)


def test_no_other_devices_are_asked_for_it(monkeypatch):
    monkeypatch.setattr(mesh, "platform", lambda: "gpu")
    monkeypatch.setattr(mesh, "chip_name", lambda: "AMD Instinct")
    assert not cudnn.is_here()
