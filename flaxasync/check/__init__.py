"""Reads compiled programs without a TPU: what overlaps, what is exposed, and whether a buffer in
flight is touched.

This package imports nothing of flaxasync but the chip table and the order of devices, and of the
other parts of flaxasync only `verify` imports it. What needs JAX, the simulator or matplotlib is
imported when it is first used.

The text of a program
  parse                    reads HLO text
  format_module            writes a module as HLO text
  HloModule                a program
  Computation              one of its computations
  Instruction              one of its instructions
  Shape                    the shape of a value
  HloError                 what `parse` raises
  AsyncOperation           a start, its updates and its dones
  async_operations         the asynchronous operations of a program, in every spelling

Did it overlap, and is it safe?
  audit                    the asynchronous operations as they were scheduled, and what is wrong
  Audit                    the result of `audit`
  Finding                  one thing that is wrong, and what to do about it
  Severity                 how bad a finding is
  CODES                    what an audit can find
  check_async_rules        only the rules of XLA's asynchronous instructions

Is it worse than before?
  summarize                what matters of a program, in rows that its names and its order do not change
  Summary                  the result of `summarize`
  Total                    what one row of it adds up
  compare                  what is different from a baseline, with source lines
  Comparison               the result of `compare`
  Change                   one difference
  read_baseline            reads a summary from a file
  write_baseline           writes a summary to a file

Where would the time go?
  timeline                 estimates it from the text
  Timeline                 the result of `timeline`
  Slice                    a period of time on one lane of one device
  Loop                     one run of a loop
  play                     compiles a function and simulates the compiler's final instructions, cycle by cycle
  save_picture             draws timelines, or results of `play`
  save_trace               writes either as a Chrome trace
  CHIPS                    the TPUs for which times can be estimated
  Chip                     one of them
  GPUS                     the GPUs for which times can be estimated
  Gpu                      one of them

Compiling for a TPU or a GPU that is not there
  compile_for              compiles a function for a topology
  CompiledProgram          the result of `compile_for`
  topology_mesh            a mesh over the devices of a topology
  topology_devices         the devices of a topology, for `flaxasync.make_mesh`
  topology_size            the number of its devices
  HLO_ONLY                 compiler options for callers that read the HLO only
  HbmError                 the program does not fit into the memory of a device

Does a call hold the host?
  check_async_compatible   reads a compiled function for what makes the host wait
  DispatchInfo             the result of `check_async_compatible`
  measure_dispatch         measures for how much of a call's time the host waits
  DispatchTiming           the result of `measure_dispatch`
  make_async_aot_caller    the compiled function, or an error if it holds the host
  command_buffer_flags     XLA flags with which a GPU runs while loops by itself
"""

import importlib
from typing import TYPE_CHECKING, Any

from flaxasync.check.auditing.async_rules import check_async_rules
from flaxasync.check.auditing.audit import audit
from flaxasync.check.auditing.findings import CODES, Audit, Finding, Severity
from flaxasync.check.compile.program import CompiledProgram, HbmError
from flaxasync.check.estimate.timeline import Loop, Slice, Timeline
from flaxasync.check.gate.comparison import Change, Comparison, compare
from flaxasync.check.gate.snapshot import Summary, Total, read_baseline, summarize, write_baseline
from flaxasync.check.hlo.async_operations import AsyncOperation, async_operations
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import HloError, Shape
from flaxasync.check.hlo.writer import format_module
from flaxasync.check.timeline_of import timeline
from flaxasync.hardware import CHIPS, GPUS, Chip, Gpu

if TYPE_CHECKING:
    from flaxasync.check.compile.compile_for import HLO_ONLY, compile_for
    from flaxasync.check.compile.topologies import topology_devices, topology_mesh, topology_size
    from flaxasync.check.dispatch.command_buffers import command_buffer_flags
    from flaxasync.check.dispatch.compatibility import (
        DispatchInfo,
        check_async_compatible,
        make_async_aot_caller,
    )
    from flaxasync.check.dispatch.timing import DispatchTiming, measure_dispatch
    from flaxasync.check.player.play import play
    from flaxasync.check.render import save_picture, save_trace

# The module of each name that is imported when it is first used.
_HOME_OF = {
    **dict.fromkeys(("HLO_ONLY", "compile_for"), "compile.compile_for"),
    **dict.fromkeys(("topology_devices", "topology_mesh", "topology_size"), "compile.topologies"),
    "command_buffer_flags": "dispatch.command_buffers",
    **dict.fromkeys(
        ("DispatchInfo", "check_async_compatible", "make_async_aot_caller"),
        "dispatch.compatibility",
    ),
    **dict.fromkeys(("DispatchTiming", "measure_dispatch"), "dispatch.timing"),
    "play": "player.play",
    **dict.fromkeys(("save_picture", "save_trace"), "render"),
}

__all__ = [
    "CHIPS",
    "CODES",
    "GPUS",
    "HLO_ONLY",
    "AsyncOperation",
    "Audit",
    "Change",
    "Chip",
    "Comparison",
    "CompiledProgram",
    "Computation",
    "DispatchInfo",
    "DispatchTiming",
    "Finding",
    "Gpu",
    "HbmError",
    "HloError",
    "HloModule",
    "Instruction",
    "Loop",
    "Severity",
    "Shape",
    "Slice",
    "Summary",
    "Timeline",
    "Total",
    "async_operations",
    "audit",
    "check_async_compatible",
    "check_async_rules",
    "command_buffer_flags",
    "compare",
    "compile_for",
    "format_module",
    "make_async_aot_caller",
    "measure_dispatch",
    "parse",
    "play",
    "read_baseline",
    "save_picture",
    "save_trace",
    "summarize",
    "timeline",
    "topology_devices",
    "topology_mesh",
    "topology_size",
    "write_baseline",
]


def __getattr__(name: str) -> Any:
    if name == "player":  # public, too: `fa.check.player` works without an import of its own
        return importlib.import_module("flaxasync.check.player")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(
        importlib.import_module(f"flaxasync.check.{_HOME_OF[name]}"), name
    )
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, "player"})
