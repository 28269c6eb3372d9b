"""Pictures and traces of timelines and of simulated runs."""

import json
import sys

import pytest

from flaxasync.check import save_picture, save_trace, timeline
from tests.check import programs
from tests.check.player.programs import simulated


def a_timeline():
    return timeline(programs.mesh_matmul())


def a_result():
    return simulated("fused")[1]


@pytest.mark.parametrize("make", [a_timeline, a_result])
def test_a_picture(make, tmp_path):
    save_picture(make(), tmp_path / "one.png")
    save_picture([make(), a_timeline()], tmp_path / "folder" / "two.png", titles=("one", "two"))
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
        assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(result.seconds * 1e6, rel=1e-3)
        return data, spans

    t = a_timeline()
    data, spans = written(t)
    assert {e["pid"] for e in spans} == {0, 1, 2, 3}
    assert all(e["dur"] > 0 for e in spans)
    assert (data["otherData"]["basis"], len(spans)) == (t.basis, len(t.slices))
    written(a_result())
