"""What is read from a compiled function agrees with what is measured, and does not need private attributes of JAX."""

import inspect
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flaxasync import check
from flaxasync.check.dispatch import command_buffers, compatibility
from tests.check.dispatch import functions
from tests.check.dispatch.functions import SIZE, TABLE, callback_that_xla_removes, dynamic_while, printing, work

FLOOR = 0.02  # seconds; far more than the host needs for a call, even while other tests use the cores
SMALL, ONES = jax.ShapeDtypeStruct((8, 8), jnp.float32), jnp.ones(4)


@pytest.fixture(scope="module")
def x():
    return jax.block_until_ready(jnp.ones((SIZE, SIZE), jnp.float32))


def compiled(fn, *args):
    return jax.jit(fn).lower(*(args or (SMALL,))).compile()


def hide_private(monkeypatch):
    monkeypatch.setattr(compatibility, "read_flags", lambda compiled: None)  # as if JAX had renamed its attributes


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.fn.__name__)
def test_the_table_of_functions_also_without_private_attributes(row, x, monkeypatch):
    aot = compiled(row.fn, x)
    info = check.check_async_compatible(aot)
    assert info.compatible is not row.waits, str(info)
    assert info.has_unordered_effects is row.unordered
    assert len(info.ordered_effects) == row.ordered
    assert info.has_host_callbacks is row.waits, "on one CPU device nothing else makes the host wait"
    assert [callback.name for callback in info.callbacks] == ([row.callbacks] if row.callbacks else [])
    assert (len(info.dynamic_loops), len(info.branches)) == (row.loops, row.branches)
    assert (info.platform, info.devices) == ("cpu", 1)
    for call in (aot, jax.jit(row.fn)):  # they behave alike
        timing = check.measure_dispatch(call, x, repeats=3, floor=FLOOR)
        assert timing.waits is row.waits, str(timing)
    # Without private attributes, only the traced function tells of a callback that XLA has removed.
    assert info.signals == ("the program's text", "the executable's private flags")
    hide_private(monkeypatch)
    info = check.check_async_compatible(aot)
    assert info.signals == ("the program's text",)
    traced = check.check_async_compatible(aot, traced=jax.jit(row.fn).trace(x))
    assert traced.signals == ("the program's text", "the jaxpr's effects and the lowered program")
    assert traced.compatible is not row.waits
    assert (traced.has_unordered_effects, len(traced.ordered_effects)) == (row.unordered, row.ordered)
    assert info.compatible is (traced.compatible or row.fn is callback_that_xla_removes)


def test_without_any_text_it_cannot_tell(monkeypatch):
    for answer in ("", "HloModule broken\n\nENTRY main {\n  x = f32[ parameter(0)\n}\n"):
        monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self, answer=answer: answer)
        info = check.check_async_compatible(compiled(work))
        assert info.compatible is None
        assert "no text" in info.reasons[0] or "could not be read" in info.reasons[0]
        assert "measure_dispatch" in info.remedies[0]
        assert check.check_async_compatible(compiled(printing)).compatible is False, (
            "the flags can turn a True into a False, and not the other way"
        )
    hide_private(monkeypatch)
    assert check.check_async_compatible(compiled(work)).has_host_callbacks is None


def test_the_reason_has_the_line_of_the_callback():
    lines, first = inspect.getsourcelines(printing)
    line = first + next(n for n, text in enumerate(lines) if "jax.debug.print" in text)
    info = check.check_async_compatible(compiled(printing))
    assert f"jax.debug.print at {inspect.getsourcefile(printing)}:{line} calls Python" in info.reasons[0]
    assert "take it out of the function" in info.remedies[0]
    assert "THE HOST WAITS" in str(info)


def test_on_several_cpu_devices_a_callback_is_named_and_does_not_make_the_host_wait():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, SIZE, SIZE)), P("data"))
        aot = compiled(jax.vmap(printing), x)
        info = check.check_async_compatible(aot)
        assert (info.compatible, info.has_host_callbacks, info.devices) == (True, True, 2)
        assert "jax.debug.print at " in info.reasons[0]
        timing = check.measure_dispatch(aot, x, repeats=3, floor=FLOOR)
        assert timing.waits is False, str(timing)


def test_on_a_gpu_loops_without_a_trip_count_and_branches_make_the_host_wait(monkeypatch):
    """The rule is taken from XLA's source. No GPU was there to measure it."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(compatibility, "_placement", lambda compiled: ("gpu", 1))
    compatible = {dynamic_while: False, functions.cond: False, functions.static_loop: True, printing: False}
    for fn, expected in compatible.items():
        assert check.check_async_compatible(compiled(fn)).compatible is expected
    info = check.check_async_compatible(compiled(dynamic_while))
    assert "functions.py:" in info.reasons[0]
    assert f"add {command_buffers.flags_for('WHILE')} to XLA_FLAGS" in info.remedies[0]
    assert "JAX does not know its version of CUDA here" in info.remedies[0]
    (remedy,) = check.check_async_compatible(compiled(functions.cond)).remedies
    assert "--xla_gpu_enable_command_buffer=+CONDITIONAL --xla_gpu_graph_min_graph_size=1" in remedy
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=+WHILE")
    info = check.check_async_compatible(compiled(dynamic_while))
    assert info.compatible is None
    assert "command buffer" in info.reasons[0]


def test_on_a_tpu_the_text_has_no_trip_counts_and_the_answer_says_so():
    info = check.check_async_compatible(check.compile_for("v5e:1x1", dynamic_while, SMALL))
    assert (info.compatible, info.platform, info.devices) == (True, "tpu", 1)
    assert "never notes a trip count" in info.reasons[0]
    assert len(info.dynamic_loops) == 1


def test_another_device_is_not_judged(monkeypatch):
    monkeypatch.setattr(compatibility, "_placement", lambda compiled: ("abacus", 1))
    info = check.check_async_compatible(compiled(printing))
    assert info.compatible is None
    assert "not measured how programs run on abacus" in info.reasons[0]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: check.check_async_compatible(jax.jit(work)), r"must be a compiled function: got \w+; get one with jax"),
    (lambda: check.check_async_compatible(jax.jit(work).lower(SMALL)), "must be a compiled function: got Lowered"),
    (lambda: check.check_async_compatible(compiled(work), traced=work),
     "traced must be a jax.stages.Traced: got function; pass jitted.trace"),
    (lambda: check.make_async_aot_caller(check.compile_for("v5e:1x1", work, SMALL)), "for a TPU that is not here"),
    (lambda: check.measure_dispatch(lambda x: np.ones(3), ONES), "jax arrays.*: got ndarray; pass a jitted function"),
    (lambda: check.measure_dispatch(lambda x: None, ONES), "must return jax arrays.*: got nothing"),
    (lambda: check.measure_dispatch(jax.jit(lambda x: x + 1, donate_argnums=0), jnp.ones(4)), "fn donates its argum"),
    (lambda: check.measure_dispatch(jax.jit(lambda x: x), ONES, repeats=0), "repeats must be at least 1: got 0"),
])  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_caller_is_the_function_unless_it_holds_the_host():
    aot = compiled(work)
    assert check.make_async_aot_caller(aot) is aot
    with pytest.raises(NotImplementedError, match=r"jax.debug.print at .*functions.py:\d+ calls Python"):
        check.make_async_aot_caller(compiled(printing))


@pytest.mark.slow
def test_a_device_without_asynchronous_dispatch_is_noticed():
    program = """
import jax, jax.numpy as jnp
jax.config.update("jax_cpu_enable_async_dispatch", False)
from flaxasync import check
x = jnp.ones((512, 512))
fn = jax.jit(lambda x: jax.lax.fori_loop(0, 16, lambda _, y: jnp.tanh(y @ x), x))
print(check.check_async_compatible(fn.lower(x).compile()).reasons, check.measure_dispatch(fn, x))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "jax_cpu_enable_async_dispatch is False" in done.stdout
    assert "the host waits: dispatch" in done.stdout


@pytest.mark.parametrize(("version", "suits", "note"), [
    (12080, False, "CUDA 12.8 is older than 12.9, and 12.8 crashes .*: install 12.9 or later"),
    (12090, True, "CUDA 12.9 runs conditional nodes"),
    (13010, True, "CUDA 13.1 runs conditional nodes"),
    (None, None, "JAX does not know its version of CUDA here; .* use 12.9 or later"),
])  # fmt: skip
def test_cuda_that_crashes_with_conditional_nodes_gets_no_flags(version, suits, note, monkeypatch, caplog):
    query = None if version is None else types.SimpleNamespace(cuda_runtime_get_version=lambda: version)
    monkeypatch.setattr("jax._src.lib.cuda_versions", query)
    monkeypatch.setattr(command_buffers, "_is_accepted", lambda flag: True)
    found, why = command_buffers.cuda_note()
    assert found is suits
    assert re.search(note, why)
    make = command_buffers.command_buffer_flags.__wrapped__
    if suits is False:
        with pytest.raises(NotImplementedError, match=note):
            make()
    else:
        assert make() == f"{command_buffers.LOOPS} {command_buffers.SMALL_GRAPHS}"
    assert ("its version of CUDA" in caplog.text) == (suits is None)


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


def test_times_are_of_one_call_on_idle_devices(x):
    """Calls do not queue up: inputs and every earlier output are ready when a call begins."""
    fn, arrays = jax.jit(work), []

    def watched(x):
        assert all(array.is_ready() for array in (x, *arrays))
        arrays.append(fn(x))
        return arrays[-1]

    timing = check.measure_dispatch(watched, fn(x), repeats=3)
    assert len(arrays) == 4
    assert 0 < timing.dispatch < timing.total
    assert timing.repeats == 3
    assert str(timing).startswith("the host does not wait: dispatch ")


def test_a_short_function_is_not_judged():
    timing = check.measure_dispatch(jax.jit(lambda x: x + 1), ONES, floor=10.0)
    assert timing.waits is None
    assert "too short to judge" in str(timing)
