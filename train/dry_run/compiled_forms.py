"""Compiles the step of a run in several forms for a topology, two at a time, and estimates their
programs.
"""

import contextvars
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Literal

import jax

from flaxasync import check
from flaxasync.check.compile.compile_for import CompilerThreads
from flaxasync.check.progress import progress
from train.config import Config
from train.dry_run.forms import Estimate
from train.lifecycle.errors import InputError, first_line
from train.metrics.output import say
from train.step.trainer import Trainer, backend_limits_are_input_errors

COMPILE_SECONDS = 2400  # time limit of one compilation beside another
AT_ONCE = 2  # forms that are compiled


class CompiledForms:
    """The programs of the forms of one run. Each is compiled once, in a thread, whose compiler is a
    process of its own.
    """

    def __init__(
        self, topology: str, mesh: jax.sharding.Mesh, kernels: Literal["play", "estimate"]
    ):
        """`kernels` says whether those of TPUs are simulated, or taken by their cost estimates."""
        self._topology = topology
        self._mesh = mesh
        self._is_tpu = topology.partition(":")[0] in check.CHIPS
        self._kernels: Literal["play"] | None = None
        if kernels == "play" and self._is_tpu:
            self._kernels = kernels
        self._threads = CompilerThreads(AT_ONCE)
        self._programs: dict[Config, Future[check.CompiledProgram]] = {}

    def start(self, form: Config) -> Future[check.CompiledProgram]:
        """Starts to compile a form, unless it was started before."""
        if form not in self._programs:
            named = f"{form.model.remat}, {form.model.fsdp_overlap}"
            say(f"compiling  {named} for {self._topology} ...")
            context = contextvars.copy_context()  # which has the kernels that are trusted
            self._programs[form] = self._threads.submit(
                context.run, compile_step, form, self._topology, self._mesh
            )
        return self._programs[form]

    def estimates(self, forms: Sequence[Config]) -> Iterable[Estimate | None]:
        """Returns what forms take, one after the other; None where the compiler refuses one."""
        if self._is_tpu:  # of GPUs only the first form that fits is needed
            for form in forms:
                self.start(form)
        return map(self._estimate, forms)

    def _estimate(self, form: Config) -> Estimate | None:
        try:
            program = self.start(form).result()
        # it does not fit, or a backend or the compiler refuses it
        except (RuntimeError, InputError) as error:
            say(f"refused    {first_line(error)}")
            return None
        return Estimate(self.timeline(program).seconds, program.bytes_by_kind["total"])

    def timeline(self, program: check.CompiledProgram) -> check.Timeline:
        """Estimates a program."""
        with progress("reading the compiled program"):
            return check.timeline(program, kernels=self._kernels, say=_say_simulated)

    def close(self) -> None:
        """Ends what is still being compiled, which nobody waits for any more."""
        self._threads.end()


def compile_step(config: Config, topology: str, mesh: jax.sharding.Mesh) -> check.CompiledProgram:
    """Compiles the training step of a run in a child process."""
    with (
        jax.set_mesh(mesh),
        backend_limits_are_input_errors(config),
        progress(f"compiling for {topology}"),
    ):
        trainer = Trainer(config, mesh)
        arguments = (trainer.abstract_state(), *trainer.abstract_batch())
        return check.compile_for(topology, trainer.train_step, *arguments, timeout=COMPILE_SECONDS)


def _say_simulated(line: str) -> None:
    say(f"simulating {line}")
