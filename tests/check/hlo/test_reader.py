"""The reader: what it makes of each construct of HLO text, what it says of other texts and files,
and large files.
"""

import contextlib
import cProfile
import gzip
import re
import subprocess
import sys

import jax
import pytest
from jax.export import export

from flaxasync.check import HloError, format_module, parse
from flaxasync.check.__main__ import main
from flaxasync.check.hlo.load import read_module
from flaxasync.check.hlo.module import Alias
from flaxasync.check.hlo.shapes import Layout, element_bits
from tests.check.hlo_texts import STEP

MODULE = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, num_partitions=4

FileNames
1 "model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=24 end_line=24 column=14 end_column=14}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%add.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[8,128], y: f32[]) -> (bf16[8,128], f32[]) {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0), metadata={op_name="jit(f)/x{(\\"" stack_frame_id=1}
  %y = f32[]{:T(128)} parameter(1)
  %c = f32[2]{0} constant({1, 2})
  %s = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128], /*index=2*/u32[]{:S(2)}) copy-start(%x)
  %d = bf16[8,128] copy-done(%s), control-predecessors={%y, %c},
    backend_config={"window_config":{"estimated_cycles":"7"}}
  %k = bf16[8,128] custom-call(%d), custom_call_target="tpu_custom_call",
    output_to_operand_aliasing={{}: (0, {})}, frontend_attributes={kernel_metadata={
"mesh_axes":"[\\"x\\"]"
}}
  ROOT %t = (bf16[8,128], f32[]) tuple(%k, /*index=1*/%y)
}
"""


def test_a_module():
    module = parse(MODULE)
    assert (module.name, module.is_scheduled, module.num_partitions) == ("jit_f", True, 4)
    assert module.attributes["input_output_alias"] == "{ {0}: (1, {}, may-alias) }"
    assert list(module.computations) == ["add.1", "main"]
    assert (module.entry.name, module.entry.root.name) == ("main", "t")
    assert parse(format_module(module)) == module
    main = module.entry.by_name
    assert (main["x"].source, main["y"].source) == ("model.py:24", "")
    assert main["x"].shape.layout == Layout((1, 0), "T(8,128)(2,1)", 1)
    assert main["x"].shape.bytes == 2048
    assert main["s"].shape.at((2,)).memory_space == 2
    assert main["c"].literal == "{1, 2}"
    assert main["d"].control_predecessors == ("y", "c")
    assert main["d"].estimated_cycles == 7
    assert main["k"].custom_call_target == "tpu_custom_call"
    assert main["k"].aliases == (Alias((), 0, ()),)
    assert main["k"].attributes["frontend_attributes"].endswith("}}")
    assert (main["t"].operands, main["t"].is_root) == (("k", "y"), True)


@pytest.mark.parametrize("line", [
    "x = f32[2]{0} parameter(0)",  # no percent sign
    "%x = f32[<=4,?] parameter(0)",  # bounded and unbounded dimensions
    "%x = ((f32[2], ()), token[]) parameter(0)",
    '%x = f32[] constant("a, (b")',
    "%x = f32[2]{0:T(1)L(128)S(4)} parameter(0), sharding={devices=[2]<=[2]}",
    "%x = s4[3]{0:E(4)} parameter(0), origin={{\"a\"}}",
    "%x = b(f32[32]{0:T(128)S(1)}) parameter(0)",  # a buffer
    "%x = (b(f32[32]{0}), (s32[], b(f32[<=4]))) parameter(0)",
])  # fmt: skip
def test_unusual_lines_survive_a_round_trip(line):
    module = parse(f"HloModule m\n\nENTRY %e (p: f32[]) -> f32[] {{\n  ROOT {line}\n}}\n")
    assert parse(format_module(module)) == module


@pytest.mark.parametrize("signature", [
    "(p: f32[2]) -> f32[2] {",
    "(p: f32[2], /*index=1*/q: s32[]) -> f32[2] { // the brace opens it",
    "(p: f32[2],\n  q: s32[]) -> f32[2] {",
    "(p: f32[2]) -> b(f32[2]) {",
    "(p: (f32[2], s32[])) -> (f32[2], s32[]) {",
    "(p: f32[2]{0}) -> f32[2]{0} {",
    "(p: f32[2]) -> f32[<=2]{0} {",
    "{",
])  # fmt: skip
def test_a_signature_may_have_layouts_tuples_and_comments_or_be_missing(signature):
    module = parse(
        f"HloModule m\n\nENTRY %e {signature}\n  ROOT %p = f32[2]{{0}} parameter(0)\n}}\n"
    )
    assert [i.name for i in module.entry.instructions] == ["p"]
    assert module.entry.root.line == 4 + signature.count("\n")


def test_operands_with_shapes_and_comments_and_the_source_line_of_older_dumps():
    add = "ROOT b = f32[2] add(f32[2]{0:T(8,128)} %a, /*index=1*/f32[2] a)"
    line = 'metadata={source_file="a.py" source_line=3}'
    module = parse(
        f"HloModule m\n\nENTRY e {{\n  a = f32[2]{{0}} parameter(0) // the input\n  {add}, "
        f"{line}\n}}"
    )
    assert module.entry.root.operands == ("a", "a")
    assert module.entry.root.source == "a.py:3"


def test_a_buffer_is_the_array_that_it_holds():
    buffer = "b(f32[32]{0:S(1)})"
    text = (
        f"HloModule m\n\nENTRY %e (p: b(f32[32])) -> b(f32[32]) {{\n  %p = {buffer} parameter(0)\n"
    )
    module = parse(
        f'{text}  ROOT %r = {buffer} custom-call({buffer} %p), custom_call_target="Pin"\n}}\n'
    )
    shape = module.entry.root.shape
    assert (str(shape), shape.bytes, shape.memory_space, shape.dimensions) == (
        buffer,
        128,
        1,
        (32,),
    )
    assert module.entry.root.operands == ("p",)
    assert shape.is_like(module.entry.parameters[0].shape)


def test_a_list_of_attributes_goes_on_over_comments_and_line_breaks():
    """Between an attribute and the next one are a comma, and blanks or comments before or after
    it.
    """
    header = (
        'HloModule m, origin_recovery_table={\n  {"a"} : {"b"},\n  "ENTRY %r { ROOT %p = f32[] '
        'parameter(0) }"\n}\n'
    )
    line = (
        'ROOT %p = f32[] parameter(0), sharding={replicated} // not "closed"\n  // nor (this\n  , '
        'metadata={op_name="//x"}'
    )
    module = parse(f"{header}, is_scheduled=true, num_partitions=2\n\nENTRY %e {{\n  {line}\n}}\n")
    assert (module.is_scheduled, module.num_partitions) == (True, 2)
    assert module.entry.root.attributes == {
        "sharding": "{replicated}",
        "metadata": '{op_name="//x"}',
    }
    twice = parse(
        "HloModule m\n\nENTRY %e {\n  %p = f32[] parameter(0), a=1\n  ROOT %q = f32[] negate(%p), "
        "a=1\n, b=2\n}\n"
    )
    assert twice.entry.root.attributes == {"a": "1", "b": "2"}


def test_bits():
    types = {"bf16": 16, "f8e4m3fn": 8, "s4": 4, "pred": 8, "c64": 64, "token": 0, "u32": 32}
    assert {name: element_bits(name) for name in types} == types


@pytest.mark.parametrize(
    ("text", "what", "line", "column"),
    [
        ("", "empty", 1, 1),
        ("hello world", "expected HLO text", 1, 1),
        ("HloModule m", "no computation", 1, 1),
        ("HloModule m\n\nwhat is this", "expected a computation", 3, 1),
        (
            "HloModule m\n\nENTRY e {\n  ROOT a = f32[] parameter(0)\n",
            "not closed: the text is cut short",
            3,
            1,
        ),
        (
            "HloModule m\n\nENTRY e {\n  ROOT a = f32[] add(b, b)\n}",
            "operand 'b' of 'a' is not defined",
            4,
            3,
        ),
        ("HloModule m\n\nENTRY e {\n  ROOT a = f32[ parameter(0)\n}", "expected a shape", 4, 12),
        (
            "HloModule m\n\nENTRY e {\n  ROOT a = f32[2]{0:S(1)S(2)} parameter(0)\n}",
            "one memory space",
            4,
            12,
        ),
        (
            "HloModule m\n\nENTRY e {\n  ROOT a = f32[x] parameter(0)\n}",
            "size of a dimension",
            4,
            12,
        ),
        ("HloModule m\n\nENTRY e {\n  ROOT a = f32[] parameter(no)\n}", "needs a number", 4, 28),
        ("HloModule m\n\nENTRY e {\n  ROOT a = f32[] tuple(\n", "not closed", 4, 23),
        (
            "HloModule m\n\nENTRY e {\n  ROOT a = f32[] parameter(0), b={\n}",
            "'e' is not closed: the text is cut",
            3,
            1,
        ),
        (
            "HloModule m\n\nENTRY e {\n  a = f32[] parameter(0)\n  a = f32[] parameter(1)\n}",
            "twice",
            5,
            3,
        ),
        (
            'HloModule m\n\ne {\n  a = f32[] parameter(0)\n}, execution_thread="a"b"c"',
            "must be a string",
            5,
            28,
        ),
        (
            'HloModule m\n\ne {\n  a = f32[] parameter(0), b={"c',
            "a string is not closed: the text is cut",
            4,
            30,
        ),
        (
            "HloModule m\n\nENTRY e (p: f32[2]) -> f32[x] {\n  p = f32[2] parameter(0)\n}",
            "size of a dimension",
            3,
            24,
        ),
        (
            "HloModule m\n\ne (p: f32[2)]) -> f32[] {\n  p = f32[2] parameter(0)\n}",
            "unexpected",
            3,
            12,
        ),
        (  # a brace that touches the shape begins its layout
            "HloModule m\n\ne (p: f32[2]) -> f32[2]{\n  p = f32[2] parameter(0)\n}",
            "expected a layout",
            3,
            18,
        ),
        ("HloModule m\n\ne {\n  a = f32[] parameter(0), b=/*c", "a comment is not closed", 4, 29),
        ("HloModule m\n\nENTRY e {\n}", "empty", 3, 1),
        (
            "HloModule m\n\nENTRY e {\n  ROOT a = f32[] call(), to_apply=%none\n}",
            "does not define",
            4,
            1,
        ),
        (
            "HloModule m\n\ne {\n  a = f32[] parameter(0)\n}\n\nHloModule n",
            "second HloModule",
            7,
            1,
        ),
        (
            "HloModule m\n\ne {\n  a = f32[] parameter(0)\n}\n\ne {\n  a = f32[] parameter(0)\n}",
            "defined twice",
            9,
            2,
        ),
    ],
)
def test_bad_text_is_an_error_with_its_position(text, what, line, column):
    with pytest.raises(HloError, match=what) as error:
        parse(text)
    assert (error.value.line, error.value.column) == (line, column)


def test_every_truncation_is_a_clean_error_or_a_module():
    for end in range(len(MODULE)):
        if MODULE[:end].rstrip().endswith("}\n}") or MODULE[:end].endswith("%b)\n}"):
            continue  # such a text is complete
        with contextlib.suppress(HloError):
            parse(MODULE[:end])
            assert MODULE[:end].rstrip().endswith("}")


@pytest.mark.parametrize(("text", "message"), [
    (MODULE.encode(), "must be a str: got bytes"),
    ("HloModule m\n\nENTRY e {\n  ROOT a = " + "(" * 100_000 + ")" * 100_000, "nested deeper"),
    ("HloModule m\n\nENTRY e {\n  ROOT a = " + "(s4[]," * 100_000 + ")" * 100_000, "nested deeper"),
], ids=["bytes", "deep", "deep in second place"])  # fmt: skip
def test_not_text_and_tuples_that_would_overflow_the_stack(text, message):
    with pytest.raises(HloError, match=message):
        parse(text)


def calls(count):
    """Returns how many functions are called while a text with `count` similar lines is read."""
    shape, config = (
        "bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}",
        '{"window_config":{"estimated_cycles":"10856"}}',
    )
    lines = [f"  %copy.{n} = {shape} copy(%p), backend_config={config}\n" for n in range(count)]
    text = f"HloModule m\n\nENTRY e {{\n  %p = bf16[1024,1024] parameter(0)\n{''.join(lines)}}}\n"
    profile = cProfile.Profile()
    profile.runcall(parse, text)
    return sum(entry.callcount for entry in profile.getstats())


def test_calls_grow_with_the_number_of_lines():
    """Reading takes time in proportion to the length of a text. This counts work and does not
    measure time.
    """
    assert calls(2000) < 2.1 * calls(1000)


SPACED = """HloModule m , num_partitions=2

%add ( a: f32[], b: f32[] ) -> f32[] {
  %a = f32[] parameter(0) , sharding={replicated}
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add( %a , %b ) , metadata={op_name="jit(f)/add" }
}

ENTRY %main (p: f32[8]) -> f32[] {
  %p = f32[8]{0} parameter(0)
  %zero = f32[] constant( 0 )
  ROOT %r = f32[] reduce( %p , %zero ) , dimensions={0} , to_apply=%add
}
"""


def test_long_gaps_take_no_time_and_change_nothing():
    """Where a text has a blank, it may have thousands. To try each way to divide thirty of them took
    a minute.
    """
    read = parse(SPACED)
    for place in re.finditer(" ", SPACED):
        text = SPACED[: place.start()] + " " * 3000 + SPACED[place.end() :]
        assert parse(text) == read, text[place.start() - 20 : place.start()]


# Files that are not the text of one compiled program, and files that are large.


def lowered() -> jax.stages.Lowered:
    return jax.jit(lambda x: x + 1).lower(1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda: STEP[: len(STEP) // 2],
            "line 23, column 45: expected an attribute .* got 'lhs', where the text ends",
        ),
        (
            lambda: STEP[: STEP.index("  %copy")],
            "computation 'forward' is not closed: the text is cut short",
        ),
        (
            lambda: lowered().as_text(),
            r"this is a lowered program \(StableHLO\), not a compiled one: call .compile\(\)",
        ),
        (lambda: lowered().as_text(debug_info=True), r"this is a lowered program \(StableHLO\)"),
        (
            lambda: lowered().compiler_ir().operation.get_asm(print_generic_op_form=True),
            r"lowered program \(StableHLO\)",
        ),
        (
            lambda: export(jax.jit(lambda x: x + 1))(1.0).mlir_module_serialized,
            "StableHLO bytecode.*xla_dump_hlo_as_text",
        ),
        (
            lambda: lowered().compiler_ir("hlo").as_serialized_hlo_module_proto(),
            "this is no text, perhaps a protobuf: write it as text",
        ),
        (lambda: gzip.compress(STEP.encode()), "this is a gzip file"),
        (lambda: b"\x00\x01plain bytes", "this is no text, perhaps a protobuf"),
        (
            lambda: STEP + "\n" + STEP.replace("jit_step", "jit_eval"),
            r"a second HloModule: the text has 2 of them \(jit_step, jit_eval\); split it before "
            r"each line HloModule",
        ),
    ],
    ids=[
        "truncated",
        "between lines",
        "stablehlo",
        "locations",
        "generic",
        "bytecode",
        "proto",
        "gzip",
        "zero",
        "two",
    ],
)
def test_what_is_no_program(tmp_path, capsys, content, message):
    file, content = tmp_path / "program", content()
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(HloError, match=message):
        read_module(file)
    assert main([str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"{file}: ")


# VmHWM is the most memory that this program had resident; `ru_maxrss` would begin with that of the
# test process.
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
    """In a process of its own, whose memory is measured: the text, its instructions, each of which
    refers to its computation, and what the audit adds.
    """
    file = tmp_path / "large.txt"
    file.write_text(repeated(STEP, 30 << 20))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(file)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 8 * file.stat().st_size


def test_the_table_calls_at_most_150_functions_for_each_instruction(tmp_path, capsys):
    """The table of ten megabytes took a minute once. This counts the calls of functions, Python's own
    among them, so that the machine does not matter.
    """

    def work(size: int) -> tuple[int, int]:
        """Returns the number of instructions of a text of about `size` bytes, and of calls."""
        text = repeated(STEP, size)
        file = tmp_path / f"{size}.txt"
        file.write_text(text)
        profile = cProfile.Profile()
        profile.runcall(main, [str(file), "--chip", "v5e"])
        assert "permute" in capsys.readouterr().out
        return text.count(" = "), sum(entry.callcount for entry in profile.getstats())

    instructions, calls_of_small = work(250_000)
    instructions_of_large, calls_of_large = work(1_000_000)
    assert calls_of_large < 1.1 * calls_of_small * instructions_of_large / instructions
    assert calls_of_large < 150 * instructions_of_large


def repeated(text: str, size: int) -> str:
    """Returns a module of about `size` bytes that calls copies of a program one after the other,
    with its arguments.
    """
    entry = parse(text).entry
    head, body = re.split(r"\n\n(?=%)", text.replace("ENTRY ", ""), maxsplit=1)
    copies = range(size // len(body))
    parts = [re.sub(r"%([\w.\-]+)", rf"%\1__{n}", body) for n in copies]
    lines = [
        f"  %p{number} = {i.shape} parameter({number})" for number, i in entry.parameters.items()
    ]
    operands = ", ".join(f"%p{number}" for number in entry.parameters)
    lines += [
        f"  %call{n} = {entry.root.shape} call({operands}), to_apply=%{entry.name}__{n}"
        for n in copies
    ]
    return "\n\n".join([head, *parts, "\n".join(["ENTRY %all {", *lines, "}\n"])])
