"""benchmarks/few_rows.py: its table in the docs, and what happens if a planned form is slower."""

import pathlib
import sys

import pytest

from benchmarks import few_rows as benchmark
from benchmarks.programs import kept

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


@pytest.mark.parametrize("planned", [0.9e-6, 2e-6])
def test_the_command_fails_if_a_planned_form_is_slower(planned, monkeypatch, capsys):
    def layer_times(topology, batch, cache):
        return {"planned": [planned if batch == 4 else 1e-6] * 3, "all-reduce": [1e-6] * 3}

    monkeypatch.setattr(benchmark, "layer_times", layer_times)
    monkeypatch.setattr(benchmark, "played", lambda topology, program, latencies, cache: [1e-6])
    monkeypatch.setattr(sys, "argv", ["few_rows.py"])
    if planned < 1e-6:
        benchmark.main()
    else:
        with pytest.raises(SystemExit, match=r"v6e:2x4 4 exchange 2.0 / 1.0 2.0 / 1.0 2.0 / 1.0"):
            benchmark.main()


def test_one_program_is_simulated_once(monkeypatch):
    """XLA's sum is planned for 64 sequences and not for one."""
    played = []
    monkeypatch.setattr(benchmark, "layer_program", lambda topology, batch, backend: backend)
    monkeypatch.setattr(benchmark, "played", lambda *call: played.append(call) or [float(len(played))])
    assert benchmark.layer_times("v5e:2x4", 64, None) == {"all-reduce": [1.0], "planned": [1.0]}
    assert benchmark.layer_times("v5e:2x4", 1, None) == {"all-reduce": [2.0], "planned": [3.0]}


def test_what_was_made_is_kept_by_its_facts(tmp_path):
    made = []

    def make():
        return made.append(1) or len(made)

    assert [kept(tmp_path / "new", facts, make) for facts in ("a", "b", "a", "b")] == [1, 2, 1, 2]
    assert kept(None, "a", make) == 3
