"""What is read from a compiled function agrees with what is measured, and does not need private
attributes of JAX.
"""

import dataclasses
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

from benchmarks import dispatch
from flaxasync import check
from flaxasync.check.dispatch import command_buffers, compatibility
from tests.check.dispatch import functions
from tests.check.dispatch.functions import (
    SIZE,
    TABLE,
    callback_that_xla_removes,
    dynamic_while,
    printing,
    work,
)
from tests.check.hlo_texts import STEP, module

# seconds; far more than the host needs for a call, even while other tests use the cores
FLOOR = 0.02
ROWS = [pytest.param(row, marks=pytest.mark.slow) if row.slow else row for row in TABLE]
SMALL, ONES = jax.ShapeDtypeStruct((8, 8), jnp.float32), jnp.ones(4)


@pytest.fixture(scope="module")
def x():
    return jax.block_until_ready(jnp.ones((SIZE, SIZE), jnp.float32))


def compiled(fn, *args):
    return jax.jit(fn).lower(*(args or (SMALL,))).compile()


def hide_private(monkeypatch):
    # as if JAX had renamed its attributes
    monkeypatch.setattr(compatibility, "read_flags", lambda compiled: None)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fn.__name__)
def test_the_table_of_functions_also_without_private_attributes(row, x, monkeypatch):
    aot = compiled(row.fn, x)
    info = check.check_async_compatible(aot)
    assert info.compatible is not row.waits, str(info)
    assert info.has_unordered_effects is row.unordered
    assert len(info.ordered_effects) == row.ordered
    assert info.has_host_callbacks is row.waits, (
        "on one CPU device nothing else makes the host wait"
    )
    assert [callback.name for callback in info.callbacks] == (
        [row.callbacks] if row.callbacks else []
    )
    assert (len(info.dynamic_loops), len(info.branches)) == (row.loops, row.branches)
    assert info.path == ("Python" if row.unordered or row.callbacks or row.waits else "C++")
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
    assert (traced.has_unordered_effects, len(traced.ordered_effects)) == (
        row.unordered,
        row.ordered,
    )
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
    assert (
        f"jax.debug.print at {inspect.getsourcefile(printing)}:{line} calls Python"
        in info.reasons[0]
    )
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


def is_called_in_python(aot, x):
    """Says whether a second call of a compiled function runs JAX's own Python function for it."""
    jax.block_until_ready(aot(x))
    entered = []

    def notice(frame, event, argument):
        if event == "call":
            entered.append(frame.f_code)

    sys.setprofile(notice)
    try:
        y = aot(x)
    finally:
        sys.setprofile(None)
    jax.block_until_ready(y)
    return jax.stages.Compiled.call.__code__ in entered


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.fn.__name__)
def test_the_path_that_jax_names_is_the_one_that_a_call_takes(row):
    aot = compiled(row.fn)
    info = check.check_async_compatible(aot)
    assert is_called_in_python(aot, jnp.ones(SMALL.shape)) == (info.path == "Python")
    assert f"JAX's {info.path} path" in str(info)


def test_the_answer_is_a_mapping_too():
    yes, no = (check.check_async_compatible(compiled(fn)) for fn in (work, printing))
    assert (yes["compatible"], no["compatible"]) == (True, False)
    assert (yes["issues"], no["issues"]) == ((), no.reasons)
    assert no["has_unordered_effects"] is no["has_host_callbacks"] is True
    assert no["ordered_effects"] == ()
    assert list(no) == list(no.keys()) == [field.name for field in dataclasses.fields(no)]
    assert dict(no) == {name: getattr(no, name) for name in no}
    assert no.get("nothing") is None
    with pytest.raises(KeyError, match="nothing"):
        no["nothing"]
    assert "issues" in yes


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(compatibility, "_placement", lambda compiled: ("gpu", 1))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("fn", "compatible", "reason"),
    [
        (work, True, "nothing in it"),
        (dynamic_while, False, "reads its condition back every time (99 % of a call on an H100)"),
        pytest.param(
            functions.lbfgs,
            False,
            "reads its condition back every time",
            marks=pytest.mark.slow,
        ),
        (functions.static_loop, True, "nothing in it"),
        (functions.cond, True, "its index is there at once (2.7 % of a call on an H100)"),
        (
            functions.cond_after_work,
            False,
            "reads back which one to take, once that is computed (by XLA's source)",
        ),
        (printing, False, "which a GPU program waits for (84 to 99 % of a call on an H100)"),
        (functions.callback_that_jax_removes, True, "nothing in it"),
        (
            callback_that_xla_removes,
            True,
            "a GPU does not wait for it (3 to 4 % of a call on an H100)",
        ),
    ],
)
def test_what_holds_a_gpu_as_the_table_of_the_page_has_it(fn, compatible, reason):
    """docs/dispatch.md has what was measured on an H100."""
    info = check.check_async_compatible(compiled(fn))
    assert info.compatible is compatible, str(info)
    assert reason in " ".join(info.reasons)
    assert bool(info.issues) == (not compatible)
    assert "not measured" not in str(info)
    if compatible:
        assert check.make_async_aot_caller(compiled(fn))


@pytest.mark.usefixtures("on_gpu")
def test_a_callback_that_nobody_can_look_for_is_taken_for_one_that_waits(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: "")
    assert check.check_async_compatible(compiled(callback_that_xla_removes)).compatible is False


def test_on_a_gpu_the_remedy_names_flags_for_the_kind_of_loop(on_gpu, monkeypatch):
    monkeypatch.setattr(command_buffers, "cuda_version", lambda: None)
    info = check.check_async_compatible(compiled(dynamic_while))
    assert "functions.py:" in info.reasons[0]
    assert f"add {command_buffers.flags_for('WHILE')} to XLA_FLAGS" in info.remedies[0]
    assert (
        "command_buffer_flags('dynamic') tries (JAX does not know its version of CUDA here"
        in info.remedies[0]
    )
    assert "use 12.8 or later" in info.remedies[0]
    (remedy,) = check.check_async_compatible(compiled(functions.lbfgs)).remedies
    assert "command_buffer_flags('nested')" in remedy
    assert "use 12.9 or later" in remedy
    (remedy,) = check.check_async_compatible(compiled(functions.cond_after_work)).remedies
    assert "--xla_gpu_enable_command_buffer=+CONDITIONAL --xla_gpu_graph_min_graph_size=1" in remedy
    assert "trip count" not in remedy
    for command, of_loop, of_branch in (("WHILE", None, False), ("CONDITIONAL", False, None)):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_enable_command_buffer=+{command}")
        loop = check.check_async_compatible(compiled(dynamic_while))
        branch = check.check_async_compatible(compiled(functions.cond_after_work))
        assert (loop.compatible, branch.compatible) == (of_loop, of_branch)
        unknown = loop if of_loop is None else branch
        assert "command buffer" in unknown.issues[0]


def test_on_a_tpu_the_text_has_no_trip_counts_and_the_answer_says_so():
    info = check.check_async_compatible(check.compile_for("v5e:1x1", dynamic_while, SMALL))
    assert (info.compatible, info.platform, info.devices) == (True, "tpu", 1)
    assert "never notes a trip count" in info.reasons[0]
    assert len(info.dynamic_loops) == 1


PRINT = """%p = f32[64] custom-call(%operand0), custom_call_target="xla_ffi_python_gpu_callback", \
custom_call_has_side_effect=true, metadata={op_name="jit(f)/debug_print"}"""


@pytest.mark.parametrize(
    ("text", "compatible", "reason"),
    [
        (module("ROOT %a = f32[64] negate(%operand0)"), True, "nothing in it"),
        (STEP, False, "no known trip count: main/w; the host reads its condition back every time"),
        (module(PRINT, "ROOT %a = f32[64] negate(%p)"), False, "jax.debug.print calls Python"),
    ],
    ids=["work", "loop", "callback"],
)
@pytest.mark.parametrize("topology", ["h100:8", "v5e:2x4"])
def test_a_program_for_devices_that_are_not_here_is_judged_as_one_for_them(
    text, compatible, reason, topology
):
    program = check.CompiledProgram(text, topology, {}, {}, tuple((0, 0, n) for n in range(8)))
    info = check.check_async_compatible(program)
    assert info.devices == 8
    if topology == "h100:8":
        assert (info.compatible, info.platform) == (compatible, "gpu")
        assert reason in info.reasons[0]
    else:
        assert info.platform == "tpu"
        assert "a TPU runs loops and branches by itself" in " ".join(info.reasons)


def test_another_device_is_not_judged(monkeypatch):
    monkeypatch.setattr(compatibility, "_placement", lambda compiled: ("abacus", 1))
    info = check.check_async_compatible(compiled(printing))
    assert info.compatible is None
    assert "not measured how programs run on abacus" in info.reasons[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: check.check_async_compatible(jax.jit(work)),
            r"must be a compiled function: got \w+; get one with jax",
        ),
        (
            lambda: check.check_async_compatible(jax.jit(work).lower(SMALL)),
            "must be a compiled function: got Lowered",
        ),
        (
            lambda: check.check_async_compatible(compiled(work), traced=work),
            "traced must be a jax.stages.Traced: got function; pass jitted.trace",
        ),
        (
            lambda: check.make_async_aot_caller(check.compile_for("v5e:1x1", work, SMALL)),
            "got a program for v5e, which is not here",
        ),
        (
            lambda: check.measure_dispatch(lambda x: np.ones(3), ONES),
            "jax arrays.*: got ndarray; pass a jitted function",
        ),
        (
            lambda: check.measure_dispatch(lambda x: None, ONES),
            "must return jax arrays.*: got nothing",
        ),
        (
            lambda: check.measure_dispatch(jax.jit(lambda x: x + 1, donate_argnums=0), jnp.ones(4)),
            "fn donates its argum",
        ),
        (
            lambda: check.measure_dispatch(jax.jit(lambda x: x), ONES, repeats=0),
            "repeats must be at least 1: got 0",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_caller_is_the_function_unless_it_holds_the_host():
    aot = compiled(work)
    assert check.make_async_aot_caller(aot) is aot
    with pytest.raises(
        NotImplementedError, match=r"jax.debug.print at .*functions.py:\d+ calls Python"
    ):
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


@pytest.mark.parametrize(
    ("version", "loops", "suits", "note"),
    [
        (12060, "dynamic", False, "CUDA 12.6 is older than 12.8, .*: install 12.8 or later"),
        (12080, "dynamic", True, "CUDA 12.8 runs dynamic loops"),
        (
            12080,
            "static",
            False,
            "CUDA 12.8 is older than 12.9, and 12.8 crashes .*: install 12.9 or later",
        ),
        (
            12080,
            "nested",
            False,
            "CUDA 12.8 is older than 12.9, and 12.8 crashes .*: install 12.9 or later",
        ),
        (12090, "static", True, "CUDA 12.9 runs static loops"),
        (13010, "nested", True, "CUDA 13.1 runs nested loops"),
        (None, "nested", None, "JAX does not know its version of CUDA here; .* use 12.9 or later"),
        (None, "dynamic", None, "JAX does not know its version of CUDA here; .* use 12.8 or later"),
    ],
)
def test_cuda_that_crashes_with_a_kind_of_loop_gets_no_flags(
    version, loops, suits, note, monkeypatch, caplog
):
    query = (
        None if version is None else types.SimpleNamespace(cuda_runtime_get_version=lambda: version)
    )
    monkeypatch.setattr("jax._src.lib.cuda_versions", query)
    monkeypatch.setattr(command_buffers, "_is_accepted", lambda flag: True)
    found, why = command_buffers.cuda_note(loops)
    assert found is suits
    assert re.search(note, why)
    make = command_buffers.command_buffer_flags.__wrapped__
    if suits is False:
        with pytest.raises(NotImplementedError, match=note):
            make(loops)
    else:
        assert make(loops) == f"{command_buffers.LOOPS} {command_buffers.SMALL_GRAPHS}"
    assert ("its version of CUDA" in caplog.text) == (suits is None)


def test_another_kind_of_loop():
    with pytest.raises(ValueError, match="loops must be one of dynamic, static, nested: got 'all'"):
        check.command_buffer_flags("all")


def test_a_pipeline_of_calls_and_the_modes_of_the_benchmark(monkeypatch):
    """The table of docs/dispatch.md is made with them; what the modes do can be measured on a GPU
    alone.
    """
    monkeypatch.setattr(command_buffers, "_is_accepted", lambda flag: True)
    check.command_buffer_flags.cache_clear()
    assert [dispatch.flags_of(mode) for mode in dispatch.MODES] == [
        "",
        "--xla_gpu_enable_command_buffer=",
        f"{command_buffers.LOOPS} {command_buffers.SMALL_GRAPHS}",
    ]
    check.command_buffer_flags.cache_clear()
    chosen = dispatch.parser().parse_args(["--command-buffers", "loops"])
    assert (chosen.command_buffers, chosen.calls) == ("loops", 8)
    seen = []

    def double(x):
        seen.append(x)
        return x * 2

    assert dispatch.pipeline(double, 3)(jnp.ones(4)).tolist() == [8.0] * 4
    assert [float(x[0]) for x in seen] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("values", "captured"),
    [
        ([], ()),
        (["+FUSION"], ()),
        (["+WHILE"], ("WHILE",)),
        (["+CONDITIONAL"], ("CONDITIONAL",)),
        (["+WHILE,+CONDITIONAL", "-WHILE"], ("CONDITIONAL",)),
        (["WHILE,FUSION", "+CONDITIONAL"], ("WHILE", "CONDITIONAL")),
        (["+WHILE", "FUSION"], ()),
    ],
)
def test_which_commands_flags_put_into_command_buffers(values, captured):
    flags = " ".join(f"--xla_gpu_enable_command_buffer={value}" for value in values)
    flags += " --xla_dump_to=WHILE"
    commands = ("WHILE", "CONDITIONAL")
    found = tuple(name for name in commands if command_buffers.may_capture(name, flags))
    assert found == captured


@pytest.mark.slow
def test_the_flags_add_loops_and_a_wrong_name_ends_another_process_only(monkeypatch):
    flags = check.command_buffer_flags().split()
    assert flags[0].startswith("--xla_gpu_enable_command_buffer=")
    commands = flags[0].partition("=")[2].split(",")
    assert "+WHILE" in commands
    assert all(command.startswith("+") for command in commands), "they replace nothing"
    assert command_buffers.may_capture("WHILE", " ".join(flags))
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
