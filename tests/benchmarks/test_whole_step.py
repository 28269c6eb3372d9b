"""benchmarks/whole_step.py: every step of its table fits its mesh, and has the tokens that its row
names.
"""

import pytest

from benchmarks.recipes import Recipe
from benchmarks.whole_step import CASES, config_of
from flaxasync.check import topology_size
from train.step.mesh import check_fits_mesh


@pytest.mark.parametrize("case", [case for case in CASES if not isinstance(case, Recipe)], ids=str)
def test_a_step_of_ours_fits_its_mesh(case):
    config, shape = config_of(case), dict(zip(("data", "fsdp", "model"), case.mesh, strict=True))
    check_fits_mesh(config, shape | {"context": 1})
    chips = shape["data"] * shape["fsdp"] * shape["model"]
    assert chips == topology_size(case.topology)
    assert (config.data.batch_size, config.data.sequence_length) == (
        case.sequences * chips,
        case.length,
    )


def test_each_chip_has_an_automatic_form():
    automatic = {case.topology for case in CASES if isinstance(case, Recipe)}
    assert automatic == {case.topology for case in CASES}
