"""The scalar unit: translates the text of an operation to Python code that computes its result.

Registers hold unsigned 32-bit integers, and floats are kept as their bits. The expressions that are
built here become the body of a basic block (basic_blocks.py). In that body `s` and `p` are the
registers and the predicates, `d` is the machine, and the functions of RUNTIME are in scope.
"""

import re
import struct
from collections.abc import Callable

from flaxasync.check.player.bundle_text import Operation

MASK = 0xFFFFFFFF

_REGISTER = re.compile(r"(!?)%([sp])\w+?_[sp](\d+)$")
_RESULT = re.compile(r"([sp])\w+?_[sp](\d+)$")
_INTEGER = re.compile(r"-?(?:0x[0-9a-f]+|\d+)$")
_FLOAT = re.compile(r"-?(?:(?:\d+\.\d*|\d*\.\d+)(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf|nan)$")
_ALLOCATION = re.compile(r"\[#(allocation\w+)((?:\s*\+\s*[^\s\]]+)*)\]$")
_MEMORY = re.compile(r"\[(?:smem|sflag):\[(.*)\]\]$", re.S)
_PLACE = re.compile(r"\{(-?\d)\}")


class NoScalarError(ValueError):
    """An operand or operation that has no meaning to the scalar unit."""


def signed(x: int) -> int:
    x &= MASK
    if x >> 31:
        return x - (1 << 32)
    return x


def as_float(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x & MASK))[0]


def as_bits(x: float) -> int:
    try:
        return struct.unpack("<I", struct.pack("<f", x))[0]
    except OverflowError:
        if x > 0:
            return 0x7F800000
        return 0xFF800000


# The functions that the expressions call.
RUNTIME = {"signed": signed, "as_float": as_float, "as_bits": as_bits}

# Templates of the expressions. {0} is the first operand, {-1} the last one.
_BY_NAME = {
    "spop.sfrf": "d.semaphore_values.popleft()",
    # the name of the same operation up to libtpu 0.0.50
    "vpop.sfrf": "d.semaphore_values.popleft()",
    "spop.sccf": "d.core_values.popleft()",
    "spop.drf": "d.divided.popleft()",
    "spop": "d.pop_vector()",
    "smul.u32.u64.high": "({0} * {1}) >> 32",
}
_BY_UNIT = {
    "por": "({0}) or ({1})",
    "pand": "({0}) and ({1})",
    "pnand": "not (({0}) and ({1}))",
    "pnor": "not (({0}) or ({1}))",
    "pxor": "bool({0}) != bool({1})",
    "pneg": "not ({0})",
    "pmov": "bool({0})",
    "smov": "{-1}",
    "int_to_ptr": "{-1}",
    "scalar_parameter_address": "d.parameters[{0}]",
    "scalar_select": "({1}) if ({0}) else ({2})",
    "sld": "d.load({0})",
    "smulhi": "({0} * {1}) >> 32",
    "sc": "({0} + {1}) > 4294967295",  # the carry of an addition
    "sclz": "32 - ({0}).bit_length()",
    "reloc": "{0}",  # the index of a word that the parts of a program share
}
_CONVERSIONS = {
    "scvt.s32.f32": "as_bits(float(signed({0})))",
    "scvt.f32.s32": "int(as_float({0})) & 4294967295",
}
_BITS = {
    "sadd": "({0} + {1}) & 4294967295",
    "ssub": "({0} - {1}) & 4294967295",
    "smul": "({0} * {1}) & 4294967295",
    "sand": "{0} & {1}",
    "sor": "{0} | {1}",
    "sxor": "{0} ^ {1}",
    "sshll": "({0} << min({1}, 32)) & 4294967295",
    "sshrl": "{0} >> min({1}, 32)",
    "sshra": "(signed({0}) >> min({1}, 31)) & 4294967295",
}
# Arithmetic by the first letter of its type.
_ARITHMETIC = {
    "u": _BITS | {name: f"{name[1:]}({{0}}, {{1}})" for name in ("smin", "smax")},
    "s": _BITS
    | {name: f"{name[1:]}(signed({{0}}), signed({{1}})) & 4294967295" for name in ("smin", "smax")},
    "f": {
        "sadd": "as_bits(as_float({0}) + as_float({1}))",
        "ssub": "as_bits(as_float({0}) - as_float({1}))",
        "smul": "as_bits(as_float({0}) * as_float({1}))",
        "smin": "as_bits(min(as_float({0}), as_float({1})))",
        "smax": "as_bits(max(as_float({0}), as_float({1})))",
    },
}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_VIEW = {"f": "as_float", "s": "signed", "u": ""}  # how a comparison reads its operands
# Operations that change no register. The operands of a phi share its register, and the caller sets
# the operands of a call.
NO_EFFECT = (
    "sphi",
    "pphi",
    "inlined_call_operand",
    "sfence",
    "compiler-scheduling-barrier",
    "vsettm",
    "xla_tuple",
)

CONSTANT_PREDICATES = {"1": "True", "!0": "True", "0": "False", "!1": "False"}

Resolve = Callable[[str], int]  # from the name of an allocation to its address


def result_register(operation: Operation) -> tuple[str, int] | None:
    """Returns the register that an operation writes, as ("s" or "p", number); None if it writes
    none.
    """
    match = _RESULT.match(operation.result)
    if match is None:
        return None
    return match[1], int(match[2])


def is_computed(operation: Operation) -> bool:
    """Says whether an operation is simulated with its values: it is one of the scalar unit, or
    writes its registers.

    The names of vector operations begin with "v", and so do those of some operations that write a
    scalar register.
    """
    return operation.unit[0] != "v" or result_register(operation) is not None


def operand_value(text: str, resolve: Resolve) -> str:
    """Returns a Python expression for the value of an operand. NoScalarError says that it is none
    for this unit.
    """
    text = text.strip()
    if match := _REGISTER.match(text):
        value = f"{match[2]}[{int(match[3])}]"
        if match[1]:
            return f"(not {value})"
        return value
    if _INTEGER.match(text):
        return str(int(text, 0) & MASK)
    if _FLOAT.match(text):
        return str(as_bits(float(text)))
    if match := _ALLOCATION.match(text):
        offsets = [
            operand_value(term.lstrip("$"), resolve)
            for term in re.findall(r"\+\s*([^\s\]]+)", match[2])
        ]
        return _sum([str(resolve(match[1])), *offsets])
    if match := _MEMORY.match(text):
        inner = match[1]
        return operand_value(f"[{inner}]" if inner.startswith("#") else inner, resolve)
    if " [#" in text:  # the text also names the buffer that a pointer belongs to
        return operand_value(text[: text.index(" [#")], resolve)
    if " + " in text:
        return _sum(
            [operand_value(term.strip().lstrip("$"), resolve) for term in text.split(" + ")]
        )
    raise NoScalarError(f"operand {text!r}")


def _sum(terms: list[str]) -> str:
    if len(terms) == 1:
        return terms[0]
    return f"(({' + '.join(terms)}) & 4294967295)"


def result_value(operation: Operation, resolve: Resolve) -> str | None:
    """Returns a Python expression for the result of an operation; None if it changes no
    register.
    """
    if operation.unit in NO_EFFECT:
        return None
    if operation.unit == "int_to_ptr":
        same = _REGISTER.match(operation.operands[-1])
        if same and result_register(operation) == (same[2], int(same[3])):
            return None
    return _PLACE.sub(
        lambda m: operand_value(operation.operands[int(m[1])], resolve), _template(operation)
    )


def _template(operation: Operation) -> str:
    name = operation.name
    unit = operation.unit
    if found := _BY_NAME.get(name) or _BY_UNIT.get(unit):
        return found
    if unit == "scmp":
        _, order, kind = name.split(".")[:3]
        view = _VIEW[kind[0]]
        return f"{view}({{0}}) {_COMPARE[order]} {view}({{1}})"
    if unit == "scalar_lea":
        if len(operation.operands) > 1:
            return "({0} + {1}) & 4294967295"
        return "{0} & 4294967295"
    if unit == "scvt":
        return _CONVERSIONS[name[: len("scvt.s32.f32")]]
    kind = name.partition(".")[2] or "s32"
    found = _ARITHMETIC.get(kind[0], _ARITHMETIC["s"]).get(unit)
    if found is None or len(operation.operands) != 2:
        raise NoScalarError(f"scalar operation {name!r}")
    return found
