"""benchmarks/gpu.py and gpu_steps.py: their rows, and what docs/gpu.md says of them."""

import itertools
import pathlib

import pytest

from benchmarks import gpu, gpu_steps
from configs.llama_8b import llama_8b
from flaxasync import check
from train.config import replace_options

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def rows_of(name):
    section = PAGE.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    for above, row in itertools.pairwise(rows):
        if row[0] == "":
            row[:2] = above[:2]
    return rows


def test_the_page_has_every_case_in_every_form():
    wanted = [[case.name, case.topology, form] for case in gpu.CASES for form in case.forms]
    assert [row[:3] for row in rows_of("gpu")] == wanted


def test_what_the_page_says_of_its_table_is_in_it():
    found = {tuple(row[:3]): row for row in rows_of("gpu")}
    mlp, layer = "MLP, 4 x 4096", "layer, 4 x 4096"

    def cell(name, form, column):
        return float(found[name, "h100:8", form][gpu.HEADER.index(column)])

    assert cell(mlp, gpu.OURS, "exposed ms") < 0.08 * cell(mlp, "automatic", "exposed ms")
    share = cell(layer, gpu.OURS, "exposed ms") / cell(layer, "automatic", "exposed ms")
    assert share == pytest.approx(0.22, abs=0.01)
    faster = cell(layer, "automatic", "predicted ms") / cell(layer, gpu.OURS, "predicted ms")
    assert faster == pytest.approx(1.45, abs=0.01)


def test_a_refused_form_has_a_row_that_says_so(monkeypatch):
    def refuse(case, form):
        raise RuntimeError("the GPU compiler refused: INTERNAL: no such thing\nand more")

    monkeypatch.setattr(gpu, "compiled", refuse)
    row = gpu.row(gpu.CASES[0], "automatic")
    assert row[3] == "refused: the GPU compiler refused: INTERNAL: no such thing"
    assert len(row) == len(gpu.HEADER)


def test_the_steps_of_the_page_are_those_that_were_measured():
    rows = rows_of("gpu steps")
    wanted = [[step.name, step.topology, f"{step.seconds:.3f}"] for step in gpu_steps.STEPS]
    assert [[row[0], row[1], row[5]] for row in rows] == wanted
    assert [step.gpus for step in gpu_steps.STEPS] == [8, 8, 64]
    eight, many = gpu_steps.STEPS[1:]
    assert eight.batch * eight.sequence / eight.gpus / eight.seconds == pytest.approx(6667)
    assert many.seconds == pytest.approx(2.555, abs=1e-3)


def test_the_run_of_a_step_has_its_mesh_and_its_model():
    config = replace_options(llama_8b(), gpu_steps.options_of(gpu_steps.STEPS[0]))
    assert (config.mesh.fsdp, config.mesh.model, config.data.batch_size) == (8, 1, 16)
    assert (config.model.mlp_width, config.model.kv_heads) == (11008, 32)


@pytest.mark.slow
def test_a_row_has_the_figures_of_the_compiled_program():
    case = gpu.Case("h100:2", "MLP", 1, 1024)
    row = gpu.row(case, gpu.OURS)
    program = gpu.compiled(case, gpu.OURS)
    assert row[:3] == ("MLP, 1 x 1024", "h100:2", gpu.OURS)
    assert row[3] == f"{check.timeline(program).seconds * 1e3:.2f}"
