"""Which part of a training step an instruction belongs to, by the path of its JAX operation."""

from flaxasync.check.estimate.phases import layer_of, part_of, phase_of


def test_operations_are_named_by_their_paths():
    ring = (
        "jit(_train_step)/transpose(jvp())/while/body/eval_jaxpr/checkpoint/shard_map/all_gather_matmul_dx/window/dot"
    )
    again = ring.replace("checkpoint/", "checkpoint/rematted_computation/")
    attention = "jit(_train_step)/jvp()/while/body/eval_jaxpr/shard_map/ring_attention/dot_general"
    assert (phase_of(ring), part_of(ring)) == ("backward", "all_gather_matmul_dx")
    assert phase_of(again) == "forward again"
    assert (phase_of(attention), part_of(attention)) == ("forward", "ring_attention")
    assert (phase_of("jit(_train_step)/optimizer/mul"), part_of("jit(_train_step)/optimizer/mul")) == ("optimizer", "")
    assert (phase_of(""), part_of("jit(_train_step)/jvp()/shard_map/mul")) == ("", "")


def test_a_layer_is_named_by_its_scopes():
    path = "jit(step)/transpose(jvp(decoder))/while/body/attention/shard_map/all_gather_matmul_dx/ppermute"
    assert layer_of(path) == "transpose(jvp(decoder))/attention/all_gather_matmul_dx"
    assert layer_of("") == ""
