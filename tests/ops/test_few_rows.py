"""The predicted sums of few rows: bounds that no prediction may pass, and where the exchange kernel is chosen."""

import pytest

import flaxasync as fa
from flaxasync.hardware import chip
from flaxasync.ops.costs import few_rows


@pytest.mark.parametrize("name", ["v5e", "v6e"])
def test_no_prediction_is_below_what_the_links_carry(name):
    """If all devices of an even ring send a block to all others, R * R / 8 blocks cross each link each way."""
    spec, row_bytes = chip(name), 8192
    for ring in few_rows.PLAYED_RINGS:
        for rows in (1, 16, 1024, 8192):
            size = rows * row_bytes
            sent = size if few_rows.steps(ring, size) == 1 else 2 * size / ring
            least = ring**2 / 8 * sent / spec.link_bandwidth
            assert few_rows.exchange_seconds(spec, ring, rows, row_bytes) >= least, (ring, rows)


def chosen(topology, ring, rows, columns=4096, k=512, **options):
    return fa.plan("matmul_all_reduce", (rows, k), (k, columns), chip=topology, ring=ring, **options).backend


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("k", [512, 1792])
@pytest.mark.parametrize(("name", "last"), [("v5e", 8), ("v6e", 16)])
def test_the_exchange_is_chosen_for_few_rows_only(name, last, k, backward):
    choices = {rows: chosen(name, 8, rows, k=k, backward=backward) for rows in (1, 2, 4, 8, 16, 32, 33, 64, 1024, 8192)}
    assert [rows for rows, backend in choices.items() if backend == "exchange"] == [
        rows for rows in choices if rows <= last
    ]


@pytest.mark.parametrize(("name", "rows", "columns", "ring"), [
    ("v6e", 33, 4096, 8), ("v6e", 32, 4096, 8), ("v5e", 64, 1024, 4), ("v6e", 128, 1024, 4),
])  # fmt: skip
def test_what_plays_no_faster_than_xla_is_not_chosen(name, rows, columns, ring):
    """In each of these cases the exchange took as long as XLA's sum, or longer, when played."""
    assert chosen(name, ring, rows, columns) == "none"


@pytest.mark.parametrize("ring", [2, 3, 16, 64])
def test_the_exchange_is_not_chosen_on_rings_where_it_was_not_played(ring):
    for rows in (1, 8, 1024):
        plan = fa.plan("matmul_all_reduce", (rows, 512), (512, 4096), chip="v5e", ring=ring, backward=False)
        assert "exchange" not in plan.costs
    assert chosen("v5e", 4, 1) == "exchange", "otherwise the test shows nothing"


def test_nothing_larger_than_what_was_played_is_exchanged(monkeypatch):
    monkeypatch.setattr(few_rows, "GAINS", -100.0)
    spec = chip("v5e")
    assert few_rows.gains(spec, 8, few_rows.PLAYED_ROWS, 128)
    assert not few_rows.gains(spec, 8, few_rows.PLAYED_ROWS + 1, 128)
    assert few_rows.gains(spec, 8, 32, 8192)
    assert not few_rows.gains(spec, 8, 33, 8192)
