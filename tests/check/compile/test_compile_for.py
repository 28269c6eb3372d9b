"""Compiling for a topology that is not there: the program is the one that JAX makes, or the refusal says why not."""

import contextlib
import os
import signal

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import CHIPS, HbmError, audit, compile_for, parse, topology_mesh
from flaxasync.check.compile.compile_for import CompilerProcess, shared_process
from flaxasync.check.compile.program import hbm_error
from flaxasync.check.hlo.origins import callback_name, is_host_callback


def test_it_is_the_program_that_jax_compiles(matmul):
    fn, *args = matmul
    program = compile_for("v5e:2x2", fn, *args)
    here = fn.lower(*args).compile()
    assert program.as_text() == here.as_text()
    assert program.memory_analysis().temp_size_in_bytes == here.memory_analysis().temp_size_in_bytes
    assert program.cost_analysis()["flops"] == here.cost_analysis()["flops"]
    assert (program.chip, program.topology) == ("v5e", "v5e:2x2")


def test_several_slices():
    """The sum over "data" leaves its slice as a send of the partial sum of one device; the other stays within it."""
    mesh = topology_mesh("v5e:2x2*2", (2, 4), ("data", "model"))
    x = jax.ShapeDtypeStruct((8192, 512), jnp.float32, sharding=NamedSharding(mesh, P("data", "model")))
    total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P("model")))
    program = compile_for("v5e:2x2*2", total, x)
    assert (program.chip, program.topology) == ("v5e", "v5e:2x2*2")
    assert len(program.coords) == 8
    (sent,) = (i for i in parse(program.text).entry.instructions if i.opcode == "send")
    assert "xla_megascale" in sent.attributes["frontend_attributes"]
    (pair,) = (p for p in audit(program).pairs if p.kind == "send")
    assert pair.bytes == 512 // 4 * 4
    assert "between slices" in " ".join(audit(program).notes)


def test_bytes_by_kind(mesh, matmul):
    kinds = compile_for("v5e:2x2", *matmul).bytes_by_kind
    assert kinds["arguments"] == 2 * (512 * 512 + 512 * 512)  # of one device's shards in bfloat16
    assert kinds["outputs"] == 2 * 512 * 512
    assert kinds["total"] == sum(kinds.values()) - kinds["total"]
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", "y")))
    donated = compile_for("v5e:2x2", jax.jit(lambda x: x + 1, donate_argnums=0), x).bytes_by_kind
    assert (donated["arguments"], donated["outputs"]) == (2 * 512 * 512, 0)


def test_options_reach_the_compiler(matmul):
    with pytest.raises(RuntimeError, match=r"refused.*no_such_option"):
        compile_for("v5e:2x2", *matmul, compiler_options={"no_such_option": "1"})


@pytest.mark.parametrize(
    "chip", [name if name == "v5e" else pytest.param(name, marks=pytest.mark.slow) for name in CHIPS]
)
def test_a_program_that_does_not_fit_is_refused_with_the_compilers_numbers(chip):
    topology = f"{chip}:1x1" if chip in ("v5e", "v6e") else f"{chip}:1x1x1"
    with pytest.raises(HbmError, match=r"refused.*HBM") as refused:
        compile_for(topology, lambda x: (x @ x).sum(), jax.ShapeDtypeStruct((2**19, 2**19), jnp.bfloat16))
    assert refused.value.needed == 2 * 2**38
    assert refused.value.available == pytest.approx(CHIPS[chip].hbm_bytes, rel=1e-4)  # the chip table has this number


def test_both_messages_of_the_compiler_are_read():
    late = hbm_error("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.32G of 15.75G hbm. Exceeded")
    assert (late.needed, late.available) == (round(18.32 * 2**30), round(15.75 * 2**30))
    assert hbm_error("INVALID_ARGUMENT: No such compile option") is None


def test_dumps(matmul, tmp_path):
    """One process compiles all three. Each folder has the dumps of its own program, even of one seen before."""
    fn, *arguments = matmul
    names = []
    for number, now in enumerate((fn, jax.jit(lambda *a: fn(*a) + 1), fn)):
        program = compile_for("v5e:2x2", now, *arguments, keep_dumps=tmp_path / str(number))
        assert program.dumps == tmp_path / str(number)
        assert len(list(program.dumps.glob("*-TLP-*-final_bundles.txt"))) == 1
        names.append({path.name.split("-", 1)[1] for path in program.dumps.iterdir()})
    assert names[0] == names[2] != names[1]


def test_host_callbacks_compile(mesh):
    """A callback is needed only where the program runs."""

    def fn(x):
        jax.debug.print("{}", x.sum())
        return io_callback(lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x.sum(), ordered=True)

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))
    program = compile_for("v5e:2x2", fn, x)
    (computation,) = (c for c in parse(program.text).computations.values() if c.is_entry)
    assert {callback_name(i) for i in computation.instructions if is_host_callback(i)} == {
        "jax.debug.print", "io_callback"
    }  # fmt: skip


def test_after_a_compiler_died_the_next_call_works(matmul):
    compile_for("v5e:2x2", *matmul)
    os.kill(shared_process().process.pid, signal.SIGSEGV)
    shared_process().process.wait()
    assert compile_for("v5e:2x2", *matmul).text


def test_a_process_with_other_flags_takes_the_place_of_the_shared_one(monkeypatch):
    """libtpu reads its flags once, so a program must not be compiled by a process that has those of before."""
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    before = shared_process()
    assert shared_process() is before
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768")
    other = shared_process()
    assert other is not before
    assert before.process.poll() is not None
    assert other.flags == "--xla_tpu_scoped_vmem_limit_kib=32768"
    monkeypatch.undo()
    assert shared_process() is not other


@pytest.mark.parametrize(
    ("sent", "seconds", "message"),
    [(signal.SIGSTOP, 0.1, r"did not finish in 0\.1 s"), (signal.SIGSEGV, 60, "died of SIGSEGV")],
)
def test_a_hang_or_a_death_while_compiling_is_named(sent, seconds, message):
    with contextlib.closing(CompilerProcess()) as process:
        os.kill(process.process.pid, sent)
        with pytest.raises(RuntimeError, match=message):
            process.compile({}, seconds)
