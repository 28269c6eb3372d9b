"""Reads compiled programs without a TPU: what overlaps, what is exposed, and whether a buffer in flight is touched.

This package imports nothing of flaxasync but the chip table and the order of devices, and no other part of flaxasync
imports it. A name is imported when it is first used, so that reading a text needs neither JAX nor matplotlib.

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
  to_long_form             writes them as async-start, async-update and async-done
  to_sugar                 writes them as op-start and op-done of the operations that they wrap

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
  Row                      what one row of it counts
  compare                  what is different from a baseline, with source lines
  Comparison               the result of `compare`
  Change                   one difference
  Tolerances               what may be different
  read_baseline            reads a summary from a file
  write_baseline           writes a summary to a file

What does a run compile?
  capture                  records every program that JAX compiles in this process
  CapturedProgram          one of them
  read_folder              reads the programs that were captured to a folder
  overview                 the worst transfers over all programs of a run
  Overview                 the result of `overview`

Where would the time go?
  timeline                 estimates it from the text
  Timeline                 the result of `timeline`
  Slice                    a period of time on one lane of one device
  Loop                     one run of a loop
  play                     compiles a function and simulates the compiler's final instructions, cycle by cycle
  save_picture             draws timelines, or results of `play`
  save_trace               writes either as a Chrome trace
  CHIPS                    the chips for which times can be estimated
  Chip                     one of them

Compiling for a TPU that is not there
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
  make_async_aot_caller    a caller that refuses functions which hold the host
  command_buffer_flags     XLA flags with which a GPU runs while loops by itself
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxasync.check.auditing.audit import audit as audit
    from flaxasync.check.auditing.findings import CODES as CODES
    from flaxasync.check.auditing.findings import Finding as Finding
    from flaxasync.check.auditing.findings import Severity as Severity
    from flaxasync.check.auditing.pairing_rules import check_async_rules as check_async_rules
    from flaxasync.check.auditing.report import Audit as Audit
    from flaxasync.check.capturing.overview import Overview as Overview
    from flaxasync.check.capturing.overview import overview as overview
    from flaxasync.check.capturing.programs import CapturedProgram as CapturedProgram
    from flaxasync.check.capturing.programs import read_folder as read_folder
    from flaxasync.check.capturing.recorder import capture as capture
    from flaxasync.check.compile.compile_for import HLO_ONLY as HLO_ONLY
    from flaxasync.check.compile.compile_for import compile_for as compile_for
    from flaxasync.check.compile.hbm_error import HbmError as HbmError
    from flaxasync.check.compile.program import CompiledProgram as CompiledProgram
    from flaxasync.check.compile.topologies import topology_devices as topology_devices
    from flaxasync.check.compile.topologies import topology_mesh as topology_mesh
    from flaxasync.check.compile.topologies import topology_size as topology_size
    from flaxasync.check.dispatch.async_caller import make_async_aot_caller as make_async_aot_caller
    from flaxasync.check.dispatch.command_buffers import command_buffer_flags as command_buffer_flags
    from flaxasync.check.dispatch.compatibility import DispatchInfo as DispatchInfo
    from flaxasync.check.dispatch.compatibility import check_async_compatible as check_async_compatible
    from flaxasync.check.dispatch.timing import DispatchTiming as DispatchTiming
    from flaxasync.check.dispatch.timing import measure_dispatch as measure_dispatch
    from flaxasync.check.estimate.timeline import Loop as Loop
    from flaxasync.check.estimate.timeline import Slice as Slice
    from flaxasync.check.estimate.timeline import Timeline as Timeline
    from flaxasync.check.gate.baseline import read_baseline as read_baseline
    from flaxasync.check.gate.baseline import write_baseline as write_baseline
    from flaxasync.check.gate.comparison import Change as Change
    from flaxasync.check.gate.comparison import Comparison as Comparison
    from flaxasync.check.gate.comparison import Tolerances as Tolerances
    from flaxasync.check.gate.comparison import compare as compare
    from flaxasync.check.gate.summary import Row as Row
    from flaxasync.check.gate.summary import Summary as Summary
    from flaxasync.check.gate.summary import summarize as summarize
    from flaxasync.check.hlo.async_operations import AsyncOperation as AsyncOperation
    from flaxasync.check.hlo.async_operations import async_operations as async_operations
    from flaxasync.check.hlo.async_sugar import to_long_form as to_long_form
    from flaxasync.check.hlo.async_sugar import to_sugar as to_sugar
    from flaxasync.check.hlo.error import HloError as HloError
    from flaxasync.check.hlo.module import Computation as Computation
    from flaxasync.check.hlo.module import HloModule as HloModule
    from flaxasync.check.hlo.module import Instruction as Instruction
    from flaxasync.check.hlo.reader import parse as parse
    from flaxasync.check.hlo.shapes import Shape as Shape
    from flaxasync.check.hlo.writer import format_module as format_module
    from flaxasync.check.player.play import play as play
    from flaxasync.check.render import save_picture as save_picture
    from flaxasync.check.render import save_trace as save_trace
    from flaxasync.check.timeline_of import timeline as timeline
    from flaxasync.hardware import CHIPS as CHIPS
    from flaxasync.hardware import Chip as Chip

# The module that each public name is imported from.
_HOMES = {
    "flaxasync.check.auditing.audit": ("audit",),
    "flaxasync.check.auditing.findings": ("CODES", "Finding", "Severity"),
    "flaxasync.check.auditing.pairing_rules": ("check_async_rules",),
    "flaxasync.check.auditing.report": ("Audit",),
    "flaxasync.check.capturing.overview": ("Overview", "overview"),
    "flaxasync.check.capturing.programs": ("CapturedProgram", "read_folder"),
    "flaxasync.check.capturing.recorder": ("capture",),
    "flaxasync.check.compile.compile_for": ("HLO_ONLY", "compile_for"),
    "flaxasync.check.compile.hbm_error": ("HbmError",),
    "flaxasync.check.compile.program": ("CompiledProgram",),
    "flaxasync.check.compile.topologies": ("topology_devices", "topology_mesh", "topology_size"),
    "flaxasync.check.dispatch.async_caller": ("make_async_aot_caller",),
    "flaxasync.check.dispatch.command_buffers": ("command_buffer_flags",),
    "flaxasync.check.dispatch.compatibility": ("DispatchInfo", "check_async_compatible"),
    "flaxasync.check.dispatch.timing": ("DispatchTiming", "measure_dispatch"),
    "flaxasync.check.estimate.timeline": ("Loop", "Slice", "Timeline"),
    "flaxasync.check.gate.baseline": ("read_baseline", "write_baseline"),
    "flaxasync.check.gate.comparison": ("Change", "Comparison", "Tolerances", "compare"),
    "flaxasync.check.gate.summary": ("Row", "Summary", "summarize"),
    "flaxasync.check.hlo.async_operations": ("AsyncOperation", "async_operations"),
    "flaxasync.check.hlo.async_sugar": ("to_long_form", "to_sugar"),
    "flaxasync.check.hlo.error": ("HloError",),
    "flaxasync.check.hlo.module": ("Computation", "HloModule", "Instruction"),
    "flaxasync.check.hlo.reader": ("parse",),
    "flaxasync.check.hlo.shapes": ("Shape",),
    "flaxasync.check.hlo.writer": ("format_module",),
    "flaxasync.check.player.play": ("play",),
    "flaxasync.check.render": ("save_picture", "save_trace"),
    "flaxasync.check.timeline_of": ("timeline",),
    "flaxasync.hardware": ("CHIPS", "Chip"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "player":  # public, too: `fa.check.player` works without an import of its own
        return importlib.import_module("flaxasync.check.player")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, "player"})
