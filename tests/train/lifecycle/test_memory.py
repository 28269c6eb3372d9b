"""Tests of train/lifecycle/memory.py: sizes that no memory has are refused before anything is
compiled.
"""

import re
from pathlib import Path

import jax
import pytest

from train.lifecycle.errors import InputError
from train.lifecycle.memory import check_memory, host_memory, least_bytes
from train.step.trainer import Trainer


def test_the_least_bytes_are_those_of_the_arrays(config, mesh, trainer):
    """Of the state as it is on a device, of its gradients, of int32 tokens and targets, and of a
    layer's input.
    """
    state = trainer.init()
    on_first = [
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state, state.params))
    ]
    needs = least_bytes(trainer, config, mesh)
    assert list(needs.values()) == [sum(on_first), 2 * 8 * 16 * 4 // 2, 8 * 16 * 16 * 4 // 8]
    check_memory(trainer, config, mesh)


@pytest.mark.parametrize(("section", "field", "value"), [
    ("data", "batch_size", 2**26),
    ("model", "layers", 2**31 - 1),
    ("model", "vocab_size", 2**31 - 1),
    ("model", "mlp_width", 2**31 - 8),
])  # fmt: skip
def test_a_size_that_no_memory_has_is_refused(section, field, value, config, mesh, replace):
    config = replace(config, **{section: {field: value}})
    with pytest.raises(
        InputError,
        match=r"must fit the memory of this host, which has [\d,.e+]+ GiB: it needs at least",
    ):
        check_memory(Trainer(config, mesh), config, mesh)


def test_the_memory_of_the_host_is_at_most_that_of_the_machine():
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert 0 < host_memory() <= int(total[1]) * 1024
