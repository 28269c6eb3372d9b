"""What `play` and `play_dump` return: the same every time, with its error, and as a table and JSON."""

import dataclasses
import json

import pytest

from flaxasync.check.player import basic_blocks, play_dump, played_chip
from tests.check.player.study import simulated


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


def test_the_timeline_of_a_result():
    _, result = simulated("fused")
    timeline = result.timeline()
    assert (timeline.seconds, timeline.exposed) == (result.seconds, pytest.approx(result.exposed))


def test_a_block_is_compiled_once_and_timed_once_for_each_state(monkeypatch):
    """This keeps a simulation fast: the inner loops of a matmul are executed often, and compiled and timed rarely."""
    compiled, timed = [], []
    compile_block, time_block = basic_blocks.Code._compile, basic_blocks.BasicBlock.time

    def compile_and_count(code, start):
        compiled.append((code.program.name, start))
        return compile_block(code, start)

    def time_and_count(block, units, latency):
        timed.append((id(block), units))
        return time_block(block, units, latency)

    monkeypatch.setattr(basic_blocks.Code, "_compile", compile_and_count)
    monkeypatch.setattr(basic_blocks.BasicBlock, "time", time_and_count)
    play_dump(simulated("fused")[0])
    assert len(compiled) == len(set(compiled)) > 10
    assert len(timed) == len(set(timed)) > 10
