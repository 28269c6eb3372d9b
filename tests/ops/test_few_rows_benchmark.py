"""benchmarks/few_rows.py: its table in the docs, its file of results, and what it simulates only once."""

import json
import pathlib
import types

import pytest

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


def test_results_are_kept_and_not_made_again(tmp_path):
    file = tmp_path / "results.json"
    with pytest.raises(ZeroDivisionError):
        benchmark.run_jobs({"a": (pow, 2, 3), "b": (divmod, 1, 0)}, file, workers=1)
    assert json.loads(file.read_text()) == {"a": 8}
    assert benchmark.run_jobs({"a": (divmod, 1, 0), "b": (pow, 2, 2)}, file, workers=1) == {"a": 8, "b": 4}
    assert json.loads(file.read_text()) == {"a": 8, "b": 4}


@pytest.mark.parametrize(("batch", "texts", "plays"), [(1, "ab", 2), (64, "aa", 1), (64, "ab", None)])
def test_one_program_is_simulated_once(batch, texts, plays, monkeypatch):
    """XLA's sum is planned for 64 sequences and not for one."""
    compiled = iter(texts)
    mesh = types.SimpleNamespace(sharding=types.SimpleNamespace(mesh=None))
    played = []
    monkeypatch.setattr(benchmark, "layer_program", lambda *_: (None, (None, mesh)))
    monkeypatch.setattr(benchmark.jax, "set_mesh", lambda _: benchmark.tempfile.TemporaryDirectory())
    monkeypatch.setattr(
        benchmark, "compile_for", lambda *_, **__: types.SimpleNamespace(as_text=lambda: next(compiled))
    )
    monkeypatch.setattr(benchmark, "_play", lambda *_: played.append(1) or [float(len(played))])
    if plays is None:
        with pytest.raises(AssertionError, match="v5e:2x4, batch 64: one plan, but two programs"):
            benchmark.play_layer("v5e:2x4", batch)
        return
    assert benchmark.play_layer("v5e:2x4", batch) == {"all-reduce": [1.0], "planned": [float(plays)]}
