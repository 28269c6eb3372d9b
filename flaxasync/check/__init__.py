"""Reads compiled programs: what overlapped, what was exposed, whether a buffer in flight was touched. Needs no TPU."""

from flaxasync.check.async_ops import AsyncOperation as AsyncOperation
from flaxasync.check.async_ops import async_operations as async_operations
from flaxasync.check.async_rules import check_async_rules as check_async_rules
from flaxasync.check.async_sugar import to_long_form as to_long_form
from flaxasync.check.async_sugar import to_sugar as to_sugar
from flaxasync.check.audit_report import Audit as Audit
from flaxasync.check.findings import CODES as CODES
from flaxasync.check.findings import Finding as Finding
from flaxasync.check.findings import Severity as Severity
from flaxasync.check.hlo import Computation as Computation
from flaxasync.check.hlo import HloError as HloError
from flaxasync.check.hlo import HloModule as HloModule
from flaxasync.check.hlo import Instruction as Instruction
from flaxasync.check.hlo import Shape as Shape
from flaxasync.check.hlo_reader import parse as parse
from flaxasync.check.hlo_writer import format_module as format_module
from flaxasync.check.overlap import audit as audit
from flaxasync.check.player import play as play
from flaxasync.check.timeline import Timeline as Timeline
from flaxasync.check.timeline_estimate import timeline as timeline
from flaxasync.check.topology import CompiledProgram as CompiledProgram
from flaxasync.check.topology import compile_for as compile_for
from flaxasync.check.topology import topology_mesh as topology_mesh
from flaxasync.hardware import CHIPS as CHIPS
from flaxasync.hardware import Chip as Chip
