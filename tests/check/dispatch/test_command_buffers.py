"""The XLA flags for while loops on a GPU: the installed jaxlib takes them, and they add to its set."""

import pytest

from flaxasync import check
from flaxasync.check.dispatch import command_buffers


@pytest.mark.slow
def test_the_flags_add_loops_and_a_wrong_name_ends_another_process_only(monkeypatch):
    flags = check.command_buffer_flags().split()
    assert flags[0].startswith("--xla_gpu_enable_command_buffer=")
    commands = flags[0].partition("=")[2].split(",")
    assert "+WHILE" in commands
    assert all(command.startswith("+") for command in commands), "they replace nothing"
    assert command_buffers.may_capture_loops(" ".join(flags))
    assert not command_buffers.may_capture_loops("--xla_gpu_enable_command_buffer=+FUSION --xla_dump_to=WHILE")
    monkeypatch.setattr(command_buffers, "LOOPS", "--xla_gpu_enable_command_buffer=+WHLE")
    with pytest.raises(NotImplementedError, match=r"jaxlib .* does not take .*WHLE"):
        command_buffers.command_buffer_flags.__wrapped__()  # without the cache
