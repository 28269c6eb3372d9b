"""The reader and jaxlib's own parser find the same in programs that other tests compile, on CPU and for TPU."""

import os
import subprocess
import sys

import pytest

from flaxasync.check import parse, read_folder
from tests.check import differential, programs

FILES = ("tests/transport/test_xla.py", "tests/nn/test_embed.py")  # they compile many small programs in little time


@pytest.mark.slow
def test_programs_of_other_tests_on_cpu(tmp_path):
    """Runs test files with capture, as the command in differential.py does for all of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "flaxasync.check", "-p", "no:cacheprovider", *FILES]
    environment = dict(os.environ, FLAXASYNC_CAPTURE=str(tmp_path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:]
    found = differential.compare(program.as_text() for program in read_folder(tmp_path))
    assert not found.differences
    assert found.programs - found.aborted >= 20


@pytest.mark.slow
def test_programs_of_other_tests_for_tpu():
    forms = ("staggered_unroll_1", "stateful", "two_slots")
    texts = [programs.async_form(form).text for form in forms] + [programs.mesh_matmul().text]
    found = differential.compare(texts)
    assert not found.differences
    assert found.programs - found.aborted == len(texts)


def test_a_difference_is_found(monkeypatch):
    """A reader that loses an instruction differs from jaxlib's parser, and the comparison names the program."""
    text = "HloModule m\n\nENTRY e {\n  x = f32[] parameter(0)\n  ROOT y = f32[] negate(x)\n}\n"
    monkeypatch.setattr(differential, "parse", lambda text: parse(text.replace("  ROOT y = f32[] negate(x)\n", "")))
    found = differential.compare([text, text])
    assert (found.programs, found.aborted) == (1, 0)
    assert found.differences == ("HloModule m: jaxlib ('1', '2'), the reader ('1', '1')",)
    assert str(found).endswith("1 different programs: 1 differ, jaxlib's parser aborts on 0")
