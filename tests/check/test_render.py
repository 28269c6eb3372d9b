"""Pictures and traces of timelines and of simulated runs: what each band shows, and what is written
above the core.
"""

import json
import sys

import pytest

from flaxasync.check import save_picture, save_trace, timeline
from flaxasync.check.estimate import picture
from flaxasync.check.estimate.timeline import KINDS, DeviceTime, Loop, Slice, Timeline
from tests.check import programs
from tests.check.programs import simulated


def a_timeline():
    return timeline(programs.mesh_matmul())


def a_result():
    return simulated("fused")[1]


def test_a_picture(tmp_path):
    save_picture(a_result(), tmp_path / "one.png")
    save_picture([a_result(), a_timeline()], tmp_path / "folder" / "two.png", titles=("one", "two"))
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "folder/two.png"))
    assert one.startswith(b"\x89PNG")
    assert two.startswith(b"\x89PNG")
    assert one != two


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    for results, got in (([], "nothing"), ([3], "int")):
        with pytest.raises(ValueError, match=f"timeline or play returned: got {got}"):
            save_picture(results, tmp_path / "t.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib: install it"):
        save_picture(a_timeline(), tmp_path / "t.png")


def test_a_trace(tmp_path):
    def written(result):
        save_trace(result, tmp_path / "trace.json")
        data = json.loads((tmp_path / "trace.json").read_text())
        spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
        assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(
            result.seconds * 1e6, rel=1e-3
        )
        return data, spans

    t = a_timeline()
    save_trace(t, tmp_path / "folder" / "of" / "trace.json")
    assert (tmp_path / "folder" / "of" / "trace.json").exists()
    with pytest.raises(ValueError, match=r"a result must be what .*: got int"):
        save_trace(3, tmp_path / "trace.json")
    data, spans = written(t)
    assert {e["pid"] for e in spans} == {0, 1, 2, 3}
    assert all(e["dur"] > 0 for e in spans)
    assert (data["otherData"]["basis"], len(spans)) == (t.basis, len(t.slices))
    written(a_result())


# Work for 1 s, then a loop of eight iterations of 1 s, of which a quarter is work. All but the
# first are repeated.
SLICES = (
    Slice(0, "core", "first", "compute", 0.0, 1.0),
    Slice(0, "core", "dot.1", "compute", 1.0, 1.25),
    Slice(0, "core", "done.1", "stall", 1.25, 2.0, "start.1"),
    Slice(0, "link +1", "start.1", "transfer", 1.0, 2.0),
    Slice(0, "core", "7 more iterations of while.1", "repeat", 2.0, 9.0),
)
STEP = Timeline(
    "step", "v5e", "nothing", "none", SLICES, (DeviceTime(0, 9.0, 3.0, 6.0, 0.0, {}),),
    loops=(Loop("while.1", 0, 8, 1.0, 9.0, (1.0, 2.0)),),
)  # fmt: skip


@pytest.fixture
def drawn(monkeypatch):
    """The panels that were drawn."""
    found, draw = [], picture._draw_panel

    def record(axes, panel, name):
        found.append(panel)
        return draw(axes, panel, name)

    monkeypatch.setattr(picture, "_draw_panel", record)
    return found


def test_repeated_iterations_have_the_shares_of_the_one_that_they_repeat(drawn, tmp_path):
    assert {*KINDS} == picture.COLOURS.keys()
    picture.draw_timelines([STEP], tmp_path / "t.png")
    (panel,) = drawn
    shares = picture._shares(panel.bands[0, "core"], panel)
    middle = len(shares["compute"]) // 2
    assert (shares["compute"][middle], shares["stall"][middle]) == pytest.approx((0.25, 0.75))
    assert shares["compute"][10] == pytest.approx(1)
    assert "repeat" not in shares
    assert [lane for _, lane in panel.bands] == ["core", "link +1"]


def test_a_long_loop_has_a_panel_and_phases_are_named(drawn, tmp_path):
    asked = []
    picture.draw_timeline(
        STEP, tmp_path / "t.png", phase_of=lambda name: asked.append(name) or "forward"
    )
    assert [(panel.begin, panel.end) for panel in drawn] == [(0.0, 9.0), (1.0, 2.0)]
    assert drawn[1].title == "one of 8 iterations, 1 s: forward"
    assert {"first", "dot.1", "while.1"} <= {*asked}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_program_that_takes_no_time(drawn, tmp_path):
    nothing = Timeline("m", "v5e", "", "", (), (DeviceTime(0, 0.0, 0.0, 0.0, 0.0, {}),))
    picture.draw_timeline(nothing, tmp_path / "t.png")
    assert [lane for panel in drawn for _, lane in panel.bands] == ["core"]
