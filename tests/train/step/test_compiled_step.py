"""Tests of the compiled training step: which collectives it has, over which axis, and how many.

On CPU devices the model is split over a ring. On TPUs the parameters are fully sharded, too: the
tests count how often the step gathers weights and sums gradients.
"""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest

import flaxasync as fa
from configs.llama_8b import llama_8b
from configs.tiny import tiny
from flaxasync.check.compile.compile_for import HLO_ONLY
from flaxasync.check.hlo.async_operations import async_operations, collective_in_fusion
from flaxasync.check.hlo.participants import AxisNames, replica_groups
from tests.check.jaxlib_counts import counts, counts_of_jaxlib
from train.config import DataConfig, MeshConfig
from train.config.command import parse
from train.step.mesh import make_mesh, mesh_over
from train.step.trainer import Trainer

KERNELS_OF_A_LAYER = 7  # query, key, value, out, gate, up, down
OUTSIDE_OF_LAYERS = 2  # the embedding and the output projection
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
FSDP = 4


def collectives_of(module):
    """Yields each collective of a program once, however XLA spells it: alone, in a fusion, or as
    start and done.
    """
    fused = {
        name
        for c in module.computations.values()
        for i in c.instructions
        if i.opcode == "fusion"
        for name in i.called_computations
    }
    for operation in async_operations(module):
        if operation.kind in KINDS:
            yield operation.inner or operation.start
    for computation in module.computations.values():
        if computation.name in fused:
            continue
        for instruction in computation.instructions:
            if instruction.opcode in KINDS:
                yield instruction
            elif instruction.opcode == "fusion":
                inner = collective_in_fusion(instruction)
                if inner is not None and inner.opcode in KINDS:
                    yield inner


def of_loss(collective):
    """Says whether a collective is of the loss, which gathers the rows of a block of logits and
    scatters their sums.
    """
    return "linear_cross_entropy" in collective.op_name


def shapes_of(collective):
    return collective.shape.elements or (collective.shape,)


@pytest.fixture(
    params=[
        # collectives are chosen before code is optimized, and other tests share these programs
        "little",
        # the program of a run of configs/tiny.py
        pytest.param("fully", marks=[pytest.mark.optimized, pytest.mark.slow]),
    ]
)
def compiled(request, config, trainer_of):
    """A function from a backend to the module of a training step on a (2, 4) mesh and the abstract
    parameters.
    """
    config = dataclasses.replace(tiny(), mesh=config.mesh) if request.param == "fully" else config

    def compile_step(backend):
        with jax.set_mesh(make_mesh(config.mesh)):
            trainer = trainer_of(
                dataclasses.replace(config, backend=backend), jax.sharding.get_mesh()
            )
            text, params = trainer.compile_train_step().as_text(), trainer.abstract_state().params
        module = fa.check.parse(text)
        assert counts_of_jaxlib([text]) == [counts(module)]
        return module, params

    return compile_step


def test_the_ring_has_no_all_gather_and_one_all_reduce_over_data_per_gradient(compiled):
    module, params = compiled("xla")
    axes, found = AxisNames(module), list(collectives_of(module))
    assert {one.opcode for one in found if not of_loss(one)} == {"all-reduce"}
    reduced = [
        shape.dimensions for one in found if "data" in axes.of(one) for shape in shapes_of(one)
    ]
    gradients = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        local = leaf.sharding.shard_shape(leaf.shape)
        # layers are reduced inside the loop over them
        gradients[local[1:] if path[0].key == "layers" else local] += 1
    assert collections.Counter(filter(None, reduced)) == gradients


@pytest.mark.slow
def test_the_gathering_backend_has_the_collectives_that_the_ring_lacks(compiled):
    """The negative test: the same search finds all-gathers and reduce-scatters where there are
    some.
    """
    module, _ = compiled("none")
    found = list(collectives_of(module))
    gathers = [AxisNames(module).of(one) for one in found if one.opcode == "all-gather"]
    assert len(gathers) >= 4
    assert set(gathers) == {"model"}
    assert "reduce-scatter" in {one.opcode for one in found}


@pytest.mark.slow
def test_the_step_of_make_train_has_loops_of_two_turns_forward_and_backward():
    """Of every ring of a layer, and of no other one: the loops of a ring have two permutes, one in
    each turn.
    """
    config = parse([]).config
    with jax.set_mesh(make_mesh(config.mesh)):
        module = fa.check.parse(
            Trainer(config, jax.sharding.get_mesh()).compile_train_step().as_text()
        )
    found = collections.Counter()
    for computation in module.computations.values():
        for loop in computation.instructions:
            place = loop.op_name.split("/")
            # the loop over layers has the rings in its body
            if loop.opcode == "while" and "body" in place:
                body = module.computations[loop.attributes["body"].lstrip("%")]
                turns = sum(
                    instruction.opcode == "collective-permute" for instruction in body.instructions
                )
                assert turns == 2, loop.op_name
                found["transpose(jvp())" in place, place[-2]] += 1
    assert found == {
        (False, "all_gather_matmul"): 2,  # attention and the MLP have one each
        (False, "matmul_reduce_scatter"): 2,
        (True, "all_gather_matmul_dx"): 2,
        (True, "all_gather_matmul_dw"): 2,
        # the gradients of its weights are computed in the same turns
        (True, "matmul_reduce_scatter_dx"): 2,
    }


def compiled_for(topology, *, data, fsdp, remat="layer", overlap="xla", layers=2):
    """Compiles the step of a decoder of two layers, of the preset llama_8b otherwise."""
    preset = llama_8b()
    model = dataclasses.replace(
        preset.model,
        vocab_size=1024,
        layers=layers,
        width=512,
        heads=8,
        kv_heads=8,
        mlp_width=1024,
        remat=remat,
        fsdp_overlap=overlap,
    )
    config = dataclasses.replace(
        preset, mesh=MeshConfig(data=data, fsdp=fsdp, model=2), model=model, backend="xla",
        data=DataConfig(sequence_length=512, batch_size=8),
    )  # fmt: skip
    mesh = mesh_over(fa.check.topology_devices(topology), config.mesh, topology)
    with jax.set_mesh(mesh):
        trainer = Trainer(config, mesh)
        step, args = trainer.train_step, (trainer.abstract_state(), *trainer.abstract_batch())
        return fa.check.compile_for(topology, step, *args, compiler_options=HLO_ONLY)


def program(topology, **options):
    return fa.check.parse(compiled_for(topology, **options).as_text())


def check_weights(module, *, forward, backward, gradients):
    """Asserts how often weights are gathered and gradients reduced over fsdp; the loop over layers
    counts once.
    """
    counts, summed = collections.Counter(), []
    for one in collectives_of(module):
        groups = replica_groups(one, module.num_partitions)
        if len(groups[0]) == 2:  # over the model axis, which has two devices
            continue
        is_backward = "rematted_computation" in one.op_name or "transpose(" in one.op_name
        counts[one.opcode, is_backward] += 1
        if one.opcode == "all-reduce":
            summed += [shape for shape in shapes_of(one) if np.prod(shape.dimensions) > 6 * 512]
    assert summed == [], f"all-reduce over fsdp of more than the scales of norms: {summed}"
    found = counts["all-gather", False], counts["all-gather", True], counts["reduce-scatter", True]
    assert found == (forward, backward, gradients), (
        f"gathers forward, backward, reduce-scatters: {dict(counts)}"
    )
    assert counts["reduce-scatter", False] == 0


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(("topology", "remat"), [("v6e:2x4", "layer"), ("v5e:2x4", "none")])
def test_weights_are_gathered_forward_and_to_compute_a_layer_again_and_each_gradient_is_scattered(
    topology, remat
):
    everything, again = (
        KERNELS_OF_A_LAYER + OUTSIDE_OF_LAYERS,
        KERNELS_OF_A_LAYER if remat == "layer" else 0,
    )
    module = program(topology, data=1, fsdp=FSDP, remat=remat)
    check_weights(module, forward=everything, backward=again, gradients=everything)


@pytest.mark.slow
@pytest.mark.optimized
def test_gradients_that_are_summed_on_every_device_are_noticed():
    """The negative test: a data axis of the same size keeps all weights, and sums gradients with
    all-reduce.
    """
    with pytest.raises(
        AssertionError, match=re.escape("all-reduce over fsdp of more than the scales of norms")
    ):
        check_weights(program("v5e:2x4", data=FSDP, fsdp=1), forward=0, backward=0, gradients=0)


@pytest.mark.slow
@pytest.mark.optimized
# of the six, four are in a loop
@pytest.mark.parametrize(("overlap", "layers"), [("xla", 4), ("prefetch_pallas", 6)])
def test_what_layers_offload_travels_to_the_host_and_back(overlap, layers):
    """Layer inputs, queries, keys and values, and never a stack of them at once."""
    step = compiled_for(
        "v6e:2x4", data=1, fsdp=FSDP, overlap=overlap, layers=layers, remat="offload"
    )
    stream, heads = 2 * 256 * 512 * 2, 2 * 512 * 4 * 64 * 2  # bytes
    moved = collections.Counter()
    for one in fa.check.timeline(step).slices:
        if one.lane in ("to host", "from host"):
            moved[one.lane] += round(one.seconds * fa.check.CHIPS["v6e"].host_bandwidth)
    assert moved == dict.fromkeys(("to host", "from host"), layers * (stream + 3 * heads))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_direct_copies_last_as_long_as_a_layer(topology):
    """Every weight is gathered, and every gradient sent, by a pair whose two ends enclose a layer
    in the same turn.

    The loops have two layers in a body, and two more are beside them. One gather is before the
    first layer, and one exchange after the last one. The gather of the output projection encloses a
    loop, and its exchange two layers. XLA gathers the embedding, which comes first.
    """
    module = program(topology, data=1, fsdp=FSDP, overlap="prefetch_pallas", layers=6)
    check_weights(module, forward=1, backward=0, gradients=1)
    found = fa.check.audit(module)
    assert not [finding for finding in found.findings if finding.severity == "error"]
    assert "loop-copies" not in {finding.code for finding in found.findings}
    pairs = collections.Counter()
    for operation in async_operations(module):
        if operation.spelling != "kernel" or not operation.name.startswith(
            ("all_gather", "all_to_all")
        ):
            continue
        kind, _ = operation.name.split("_start")
        (window,) = operation.windows
        assert window.done.computation.name == operation.computation
        assert window.crosses == ()
        inside = [
            i
            for s in window.spans
            for i in module.computations[s.computation].instructions[s.first : s.stop]
        ]
        in_layer, loops = (
            sum("dot_general" in i.op_name for i in inside),
            sum(i.opcode == "while" for i in inside),
        )
        pairs[kind, in_layer >= KERNELS_OF_A_LAYER or loops == 1] += 1
    assert pairs == {
        ("all_gather", True): 8 * KERNELS_OF_A_LAYER + 1,
        ("all_gather", False): KERNELS_OF_A_LAYER,
        ("all_to_all", True): 4 * KERNELS_OF_A_LAYER + 1,
        ("all_to_all", False): KERNELS_OF_A_LAYER,
    }
