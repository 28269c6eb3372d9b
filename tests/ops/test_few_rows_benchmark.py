"""benchmarks/few_rows.py: its table in the docs, its file of results, and what it simulates only once."""

import pathlib

from benchmarks import few_rows as benchmark

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "kernels" / "exchange.md").read_text()
SECTION = PAGE.partition("<!-- few rows layer -->")[2].partition("<!-- /few rows layer -->")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("|")]


def test_the_page_has_every_layer_and_the_planned_form_is_never_slower():
    """The table is that of the present plan. Where XLA's sum is planned, the two programs are one."""
    cases = [(topology, batch) for topology in benchmark.TOPOLOGIES for batch in benchmark.BATCHES]
    assert [tuple(row[:2]) for row in ROWS[2:]] == [(topology, str(batch)) for topology, batch in cases]
    for (topology, batch), (_, _, names, times, *_) in zip(cases, ROWS[2:], strict=True):
        plan = " and ".join(dict.fromkeys(benchmark.planned(topology, batch)))
        assert names == plan, "run python benchmarks/few_rows.py --write docs/kernels/exchange.md"
        taken, serial = map(float, times.split(" / "))
        assert taken == serial if plan == "none" else taken < serial, (topology, batch)


def test_a_planned_form_that_is_slower_is_named():
    times = {f"layer {t}, batch {n}": {"planned": [1e-6] * 3, "all-reduce": [1e-6] * 3}
             for t in benchmark.TOPOLOGIES for n in benchmark.BATCHES}  # fmt: skip
    assert benchmark.layer_table(times)[2] == []
    times["layer v6e:2x4, batch 4"]["planned"][0] = 2e-6
    assert benchmark.layer_table(times)[2] == ["v6e:2x4 4 exchange 2.0 / 1.0 1.0 / 1.0 1.0 / 1.0"]
