"""Files that are not the text of one compiled program: each has a message that says what it is and what to do."""

# ruff: noqa: E501, because one file with its message is one line

import gzip
import re
import resource
import subprocess
import sys

import jax
import pytest
from jax.export import export

from benchmarks.timeline import study
from flaxasync.check import HLO_ONLY, HloError, compile_for, parse
from flaxasync.check.__main__ import main
from flaxasync.check.hlo.load import read_module
from tests.check.hlo_texts import STEP


def lowered() -> jax.stages.Lowered:
    return jax.jit(lambda x: x + 1).lower(1.0)


@pytest.mark.parametrize(("content", "message"), [
    (lambda: STEP[: len(STEP) // 2], "line 23, column 45: expected an attribute .* got 'lhs', where the text ends"),
    (lambda: STEP[: STEP.index("  %copy")], "computation 'forward' is not closed: the text is cut short"),
    (lambda: lowered().as_text(), r"this is a lowered program \(StableHLO\), not a compiled one: call .compile\(\)"),
    (lambda: lowered().as_text(debug_info=True), r"this is a lowered program \(StableHLO\)"),
    (lambda: lowered().compiler_ir().operation.get_asm(print_generic_op_form=True), r"lowered program \(StableHLO\)"),
    (lambda: export(jax.jit(lambda x: x + 1))(1.0).mlir_module_serialized, "StableHLO bytecode.*xla_dump_hlo_as_text"),
    (
        lambda: lowered().compiler_ir("hlo").as_serialized_hlo_module_proto(),
        "this is no text, perhaps a protobuf: write it as text",
    ),
    (lambda: gzip.compress(STEP.encode()), "this is a gzip file"),
    (lambda: b"\x00\x01plain bytes", "this is no text, perhaps a protobuf"),
    (
        lambda: STEP + "\n" + STEP.replace("jit_step", "jit_eval"),
        r"a second HloModule: the text has 2 of them \(jit_step, jit_eval\); split it before each line HloModule",
    ),
], ids=["truncated", "between lines", "stablehlo", "locations", "generic", "bytecode", "proto", "gzip", "zero", "two"])  # fmt: skip
def test_what_is_no_program(tmp_path, capsys, content, message):
    file, content = tmp_path / "program", content()
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(HloError, match=message):
        read_module(file)
    assert main([str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"{file}: ")


# VmHWM is the most memory that this program had resident; `ru_maxrss` would begin with that of the test process.
MEASURE = """
import sys
from flaxasync.check import audit
from flaxasync.check.hlo.load import read_module
def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
before = peak()
audit(read_module(sys.argv[1]))
print(peak() - before)
"""


@pytest.mark.slow
def test_a_large_file_takes_a_small_multiple_of_its_size(tmp_path):
    """In a process of its own, whose memory is measured: the text, its instructions, and what the audit adds."""
    file = tmp_path / "large.txt"
    file.write_text(repeated(STEP, 30 << 20))
    done = subprocess.run([sys.executable, "-c", MEASURE, str(file)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * file.stat().st_size


@pytest.mark.slow
def test_the_table_of_ten_megabytes_takes_less_than_two_seconds(tmp_path):
    """Of processor time, because other work on the machine lengthens the elapsed time. The least of three runs."""
    fn, arguments = study()
    program = compile_for("v5e:2x2", fn, *arguments, compiler_options=HLO_ONLY)
    file = tmp_path / "ten.txt"
    file.write_text(repeated(program.text, 10_000_000))
    assert file.stat().st_size > 9_500_000
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "flaxasync.check", str(file), "--chip", "v5e"], stdout=subprocess.DEVNULL, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 2


def repeated(text: str, size: int) -> str:
    """Returns a module of about `size` bytes that calls copies of a program one after the other, with its arguments."""
    entry = parse(text).entry
    head, body = re.split(r"\n\n(?=%)", text.replace("ENTRY ", ""), maxsplit=1)
    copies = range(size // len(body))
    parts = [re.sub(r"%([\w.\-]+)", rf"%\1__{n}", body) for n in copies]
    lines = [f"  %p{number} = {i.shape} parameter({number})" for number, i in entry.parameters.items()]
    operands = ", ".join(f"%p{number}" for number in entry.parameters)
    lines += [f"  %call{n} = {entry.root.shape} call({operands}), to_apply=%{entry.name}__{n}" for n in copies]
    return "\n\n".join([head, *parts, "\n".join(["ENTRY %all {", *lines, "}\n"])])
