"""Tests of train/report.py: the page has the figures of the run, needs no network, and works in a
real browser.
"""

import dataclasses
import gzip
import html
import json
import re
import shutil
import subprocess

import pytest

from train import report
from train.config.command import parse

SAMPLE = "</script><b>not markup</b><!-- <script>"


@pytest.fixture
def workdir(tmp_path):
    """A run with a restart, a skipped update, two validations and a sample with markup."""
    folder = tmp_path / "first_run"
    folder.mkdir()
    lines = [
        {
            "step": step,
            "loss": 5 - step / 100,
            "grad_norm": 1.0,
            "tokens": step * 64,
            "skipped": int(step == 60),
        }
        | {"tokens_per_second": 1000.0 + step, "step_seconds": 0.064, "goodput": 0.9}
        | (
            {"validation_loss": 4.5 - step / 100, "validation_perplexity": 90.0}
            if step % 50 == 0
            else {}
        )
        for step in range(1, 101)
    ]
    start = {
        "event": "start",
        "time": "2026-01-01T00:00:00",
        "unix": 0.0,
        "devices": [8, "cpu"],
        "step": 0,
    }
    events = [
        start,
        {"event": "compiled", "unix": 4.0, "seconds": 3.0, "memory_bytes": {"argument": 3 << 20}},
        {"event": "checkpoint", "step": 50, "unix": 30.0},
        {"event": "stop", "step": 55, "signal": "SIGTERM", "unix": 33.0},
        start | {"step": 55, "unix": 40.0, "changes": ["steps was 80 and is 100"]},
        {"event": "skipped", "step": 60, "loss": None, "unix": 50.0},
        {"event": "complete", "step": 100, "unix": 120.0},
    ]
    for name, content in (("metrics.jsonl", lines), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    config = parse(["configs/tiny.py", "--steps", "100", "--optimizer.clip_norm", "inf"]).config
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (folder / "sample.txt").write_text(SAMPLE)
    (folder / "program.txt.gz").write_bytes(gzip.compress(b"HloModule m"))
    return folder


def test_the_figures_of_a_run(workdir):
    run = report.read_run(workdir)
    assert run["figures"] == {
        "steps": "100 of 100",
        "loss": "4.0000",
        "validation loss": "3.5000",
        "starts": "2",
        "skipped updates": "1",
        "storage errors": "0",
        "tokens": "6,400",
        "tokens per second (median)": "1,050",
        "step seconds (median)": "0.064",
        "goodput": "90.0%",
        "wall time": "2.0 min",
        "state": "complete",
    }
    assert run["series"]["validation_loss"] == [[50, 4.0], [100, 3.5]]
    assert run["memory"] == {"argument": 3 << 20}
    assert "compiled for cpu" in run["audit"]


def test_a_long_curve_keeps_its_spikes():
    points = [[step, 1.0] for step in range(1, 50_001)]
    points[31_415][1] = 99.0
    thin = report._thin(points)
    assert len(thin) <= report.MOST_POINTS
    assert [31_416, 99.0] in thin


def test_the_page_is_one_file_that_loads_nothing_and_takes_infinite_options_and_any_sample(
    workdir, capsys
):
    assert report.main([str(workdir)]) == 0
    page = (workdir / "report.html").read_text()
    assert capsys.readouterr().out == f"{workdir / 'report.html'}\n"
    assert not re.search(r"""(src|href)\s*=|url\(|@import|fetch\(|import\(""", page)
    before, after = report.TEMPLATE.read_text().split(report.MARK)
    data = page.removeprefix(before).removesuffix(after)
    assert "<" not in data, "the sample must not end the script"
    (run,) = json.loads(data)
    assert run["config"]["optimizer"]["clip_norm"] == "Infinity"
    assert run["sample"] == SAMPLE


def test_a_folder_without_a_run_is_refused(tmp_path, refuses):
    refuses(report.main, f"there is no {tmp_path}/metrics.jsonl", tmp_path)


IN_THE_BROWSER = """
const all = selector => [...document.querySelectorAll(selector)];
const root = document.documentElement, svg = document.querySelector("[data-metric=loss] svg");
const text = document.body.innerText, box = svg.getBoundingClientRect();
const over = {clientX: box.right - 3 * box.width / 480 - 8, clientY: box.top + 40, bubbles: true};
svg.dispatchEvent(new PointerEvent("pointermove", over));
document.body.textContent = JSON.stringify({
  text, overflow: root.scrollWidth - root.clientWidth, metrics: all(".chart").map(chart => chart.dataset.metric),
  curves: all("[data-metric=loss] path").length, tip: document.querySelector("[data-metric=loss] .tip").innerText,
  marks: all("[data-metric=loss] :is(line.start, line.skipped)").length});
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium; .ci/run installs it")
@pytest.mark.parametrize("width", [500, 1280])
def test_the_page_in_a_browser(width, workdir, tmp_path):
    """The page draws itself in a headless Chromium, and a script at its end replaces it by what it
    sees.
    """
    second = tmp_path / "second_run"
    second.mkdir()
    (second / "metrics.jsonl").write_text('{"step": 1, "loss": 6.0}\n{"step": 90, "loss": 3.0}\n')
    page = tmp_path / "report.html"
    assert report.main([str(workdir), str(second), "--out", str(page)]) == 0
    page.write_text(
        page.read_text().replace("</html>", f"<script>{IN_THE_BROWSER}</script></html>")
    )
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        "--dump-dom",
        page.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    seen = json.loads(html.unescape(re.search(r"<body>(.*)</body>", dom, re.DOTALL)[1]))
    for figure in (
        "4.0000",
        "3.5000",
        "100 of 100",
        "90.0%",
        "SIGTERM",
        "steps was 80 and is 100",
        "3.0 MiB",
    ):
        assert figure in seen["text"], figure
    assert SAMPLE in seen["text"]
    assert seen["overflow"] <= 0, "the page is wider than the window"
    assert seen["metrics"][:2] == ["loss", "validation_loss"]
    assert (seen["curves"], seen["marks"]) == (2, 2), (
        "one curve for each run, a restart and a skipped update"
    )
    first, other = seen["tip"].splitlines()
    assert other == "step 90: 3"
    assert re.match(r"step (9\d|100): 4", first), first
