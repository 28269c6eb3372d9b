"""What `play` and `play_dump` return: the same every time, with its error, and as a table and JSON."""

import dataclasses
import json

import pytest

from flaxasync.check.player import play_dump, played_chip
from tests.check.player.programs import simulated


def test_a_simulation_is_the_same_every_time():
    folder, result = simulated("fused")
    again, third = play_dump(folder), play_dump(folder)
    assert result.to_json() == again.to_json() == third.to_json()
    assert again.slices == third.slices


def test_measured_gives_an_error_and_constants_can_be_replaced():
    folder, result = simulated("series")
    assert play_dump(folder, measured=result.seconds / 1.1).error == pytest.approx(0.1)
    slow = dataclasses.replace(played_chip("v5e"), link_efficiency=0.5)
    assert play_dump(folder, chip=slow).exposed > 1.7 * result.exposed


def test_json_and_table():
    _, result = simulated("fused")
    content = json.loads(result.to_json())
    assert content["seconds"] == result.seconds
    assert len(content["devices"]) == 4
    for text in (result.slowest.phase("fused").name, "basis:", "known error:", "device 3", "bytes of all devices"):
        assert text in str(result)
    with pytest.raises(KeyError, match=r"no phase begins with 'nothing': .*fused"):
        result.slowest.phase("nothing")


def test_the_timeline_of_a_result_has_its_times():
    _, result = simulated("fused")
    timeline = result.timeline()
    assert (timeline.seconds, timeline.exposed) == (result.seconds, pytest.approx(result.exposed))
