"""A run from its start to its end: opens its parts, continues it, and trains.

`train/run.py` imports this file after the command line has been checked, because it imports JAX.
"""

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
from etils import epath

from flaxasync.check.progress import progress
from train.checkpoints.manager import Checkpoints, load_parameters, unused_path
from train.checkpoints.record import check_identity, differences, flat_fields, identify_run
from train.checkpoints.saver import Saver
from train.config import Config, ProfileConfig, flatten
from train.config.command import Command
from train.data.batches import TrainingBatches, split
from train.data.corpus import identify, open_corpora
from train.dry_run.meshes import explains_lack
from train.lifecycle.errors import COMPLETE, DivergedError
from train.lifecycle.form import form_of_run
from train.lifecycle.memory import check_memory
from train.lifecycle.preparation import (
    agree_on_kernels,
    compile_steps,
    configure_cache,
    require_same,
)
from train.lifecycle.stopping import StopRequest, Watchdog
from train.lifecycle.workdir import Workdir, open_workdir
from train.metrics.lines import Events, provenance
from train.metrics.output import say
from train.metrics.sinks import open_recorder
from train.step import flags
from train.step.evaluation import Evaluation
from train.step.mesh import check_fits_mesh, check_host_memory, configure_jax, make_mesh, mesh_shape
from train.step.microbatches import what_differs
from train.step.trainer import Trainer, TrainState, backend_limits_are_input_errors


def train(command: Command, stop: StopRequest) -> int:
    """Trains as the command line says, and returns the exit code. The processes of the run have
    joined each other.
    """
    config = command.config
    if not config.mesh.distributed:
        configure_jax(config.mesh)
    configure_cache(config)
    # simulated devices take memory
    if config.mesh.platform == "cpu" and not config.mesh.distributed:
        check_fits_mesh(config, mesh_shape(config.mesh, config.mesh.cpu_devices, "simulated cpu"))
    with progress("opening the devices"):
        mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        check_fits_mesh(config, mesh.shape)
        check_host_memory(config, mesh)
        if config.mesh.distributed:
            agree_on_kernels()
        with open_workdir(Path(config.workdir)) as work:
            return Run(command, mesh, stop, work).run()


class Run:
    """One start of a run, whose workdir is locked."""

    def __init__(self, command: Command, mesh: jax.sharding.Mesh, stop: StopRequest, work: Workdir):
        self.command = command
        self.config = config = command.config
        self.mesh = mesh
        self.stop = stop
        self.work = work
        with progress("reading the data"):
            self.corpora = open_corpora(config.data, vocab_size=config.model.vocab_size)
        self.training, self.validation = split(self.corpora, config)
        self.evaluation = Evaluation(self.validation, config, mesh)
        self.batches = TrainingBatches(self.training, config, mesh)
        corpus = {
            name: identify(source, config.data.tokenizer) for name, source in self.corpora.items()
        }
        self.identity = identify_run(config, corpus, flags.in_effect(mesh.devices.flat[0].platform))
        kept = config.checkpoint
        folder = config.checkpoint.folder or work.checkpoints
        self.checkpoints = Checkpoints(folder, keep=kept.keep, permanent_every=kept.permanent_every)

    def run(self) -> int:
        """Starts the run, continues it, or reports that it is complete; returns the exit code."""
        work = self.work
        with self.checkpoints, contextlib.ExitStack() as stack:
            start = 0
            if self.command.resume_step != 0:
                start = self.checkpoints.choose(self.command.resume_step)
            require_same(
                {
                    "command line": flat_fields(self.config),
                    "newest checkpoint": start,
                    "data": self.identity.corpus,
                    "set of libtpu's flags": self.identity.flags,
                }
            )
            if start < self.config.steps:
                self.config = form_of_run(self.config, self.mesh, work)
            config = self.config
            with backend_limits_are_input_errors(config):
                trainer = Trainer(config, self.mesh)
            check_memory(trainer, config, self.mesh)
            if start >= config.steps:
                where = str(self.checkpoints.path(start))
                record = self.checkpoints.record(start)
                accepts = config.data.accept_change
                check_identity(record, self.identity, where=where, accept_change=accepts)
                say(f"the run is complete: step {start} of {config.steps}, in {where}")
                return COMPLETE
            changes = work.changes(config)
            parameters = sum(leaf.size for leaf in jax.tree.leaves(trainer.abstract_state().params))
            self._show_setup(parameters, changes)
            state, tokens, accepted = self._first_state(trainer, start)
            self._set_aside(start)
            events = Events(work.events if jax.process_index() == 0 else None)
            stack.callback(events.close)
            events.add(
                "start",
                step=start,
                steps=config.steps,
                devices=[self.mesh.size, self.mesh.devices.flat[0].device_kind],
                mesh=dict(self.mesh.shape),
                parameters=parameters,
                flags=self.identity.flags,
                changes=changes + accepted,
                **provenance(),
            )
            step = self._train(trainer, events, state, start, tokens)
            if step < config.steps:  # a signal stopped it
                return self.stop.exit_code
            self.stop.may_end_at_once(f"after step {step}, which is saved")
            events.add("complete", step=step)
            say(
                f"done       {self.checkpoints.path(step)}, {work.metrics}, {work.plot}, "
                f"{work.tensorboard}"
            )
        return COMPLETE

    def _show_setup(self, parameters: int, changes: list[str]) -> None:
        for section, fields in changed_fields(self.config).items():
            say(f"{section:<10} {'  '.join(f'{field}={value}' for field, value in fields.items())}")
        say("others     have their defaults; --print_config prints all fields")
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        say(f"devices    {self.mesh.size} {self.mesh.devices.flat[0].device_kind}, as {shape}")
        for name, corpus in self.corpora.items():
            called = f"{name}: " if len(self.corpora) > 1 else ""
            say(f"corpus     {called}{corpus.name}, {corpus.tokens.size:,} tokens")
        say(f"size       {parameters:,} parameters")
        count = self.config.data.microbatches
        if differs := what_differs(self.config.model, count):
            say(
                f"micro      in {count} micro-batches, the gradient is not that of the whole "
                f"batch: {differs}"
            )
        for change in changes:
            say(f"changed    {change}")

    def _first_state(
        self, trainer: Trainer, start: int
    ) -> tuple[TrainState | None, int, list[str]]:
        """Restores the checkpoint of step `start`, or takes the parameters of another run.

        Returns the state, or None if it is to be drawn; the tokens that it has consumed; and the
        changes since then.
        """
        config = self.config
        if start:
            abstract = trainer.abstract_state()
            accepts = config.data.accept_change
            with progress(f"reading the checkpoint of step {start}"):
                state, record, accepted = self.checkpoints.restore(
                    start, abstract, self.identity, accept_change=accepts
                )
            self.batches.set_state(record.data)
            say(f"resumed    {self.checkpoints.path(start)}")
            for change in accepted:
                say(f"accepted   {change}")
            other_flags = differences(record.flags, self.identity.flags)
            for change in other_flags:
                say(f"changed    {change}, so that sums may be rounded otherwise")
            return trainer.complete(state), record.tokens, accepted + other_flags
        if config.init_from is not None:
            params, path = load_parameters(config.init_from, config, trainer)
            say(f"parameters from {path}")
            return trainer.start_from(params), 0, []
        return None, 0, []

    def _set_aside(self, start: int) -> None:
        """Moves what is later than the step to continue from into the folder set_aside/."""
        work = self.work
        folder = self.work.set_aside
        if (
            self.command.resume_step is not None
            and jax.process_index() == 0
            and work.metrics.exists()
        ):
            folder.mkdir(exist_ok=True)
            shutil.copy2(work.metrics, unused_path(epath.Path(folder / work.metrics.name)))
        # a rename does not leave the file system
        beside = self.checkpoints.folder.parent / folder.name
        if moved := self.checkpoints.set_aside(start, beside):
            say(f"set aside  moved {moved} to {beside}")

    def _train(
        self, trainer: Trainer, events: Events, state: TrainState | None, start: int, tokens: int
    ) -> int:
        """Trains from step `start` to the end or until a stop is requested; returns the last step."""
        config = self.config
        work = self.work
        stop = self.stop
        with explains_lack(config, self.mesh):
            train_step, eval_step = compile_steps(trainer, config, work, events)
        if state is None:
            state = trainer.init()
        # Other processes may not know of the signal and would wait in step 1, so all stop together
        # after a step.
        if stop.signal and jax.process_count() == 1:
            say(
                f"stopped by {stop.signal.name} before the first step; there was nothing new to "
                "save"
            )
            return start
        if jax.process_index() == 0:
            work.begin(config)
        with contextlib.ExitStack() as stack:
            recorder = open_recorder(
                config, work, self.mesh, events, start=start, tokens_before=tokens
            )
            stack.callback(recorder.close)
            watchdog = stack.enter_context(Watchdog(config.report.hang_seconds, work.stacks))
            profiler = Profiler(config.profile, work.profile, events)
            stack.callback(profiler.close)
            saver = Saver(
                config,
                self.checkpoints,
                self.batches,
                recorder,
                events,
                self.identity,
                watchdog,
                self._require_unchanged,
            )
            loop = Loop(train_step, eval_step, self.evaluation, saver, stop, profiler)
            stop.only_between_steps()
            try:
                step = loop.run(state, start=start)
            except DivergedError as error:
                events.add("diverged", step=error.step, cause=str(error))
                raise self._with_advice(error) from error
        if stop.signal and step < config.steps:
            events.add("stop", step=step, signal=stop.signal.name)
            say(
                f"stopped by {stop.signal.name} after step {step}, saved in "
                f"{self.checkpoints.path(step)}"
            )
            say(f"start again with --workdir {config.workdir} to continue")
        return step

    def _require_unchanged(self) -> None:
        """Checks that the workdir and the data are still those with which the run began; otherwise
        it saves nothing.
        """
        self.work.require_lock()
        # those of the training data, too, whose last tokens are for validation
        for windows in self.evaluation.windows.values():
            windows.corpus.require_unchanged()

    def _with_advice(self, error: DivergedError) -> DivergedError:
        self.checkpoints.wait()
        good = self.checkpoints.choose(None)
        where = "there is no good checkpoint, because none was due before that step"
        if good:
            where = f"the last good checkpoint is {self.checkpoints.path(good)}, of step {good}"
        advice = (
            f", so the run was stopped and nothing was saved from there on; {where}. Starting "
            "again repeats it: try a lower optimizer.learning_rate, or --skip.nonfinite True if "
            "single batches are bad."
        )
        return DivergedError(error.step, error.cause, advice)


@dataclasses.dataclass(frozen=True)
class Loop:
    """The steps of a run. The host dispatches them ahead of the devices, and waits only to report
    or to save.
    """

    train_step: jax.stages.Compiled
    eval_step: jax.stages.Compiled | None
    evaluation: Evaluation
    saver: Saver
    stop: StopRequest
    profiler: "Profiler"

    def run(self, state: TrainState, *, start: int) -> int:
        """Trains from step `start`, whose state is donated, to the last step or a stop, saves the
        final state, and returns its step.

        Reports are one interval late: when the host waits for a report, one more interval of steps
        has already been dispatched, so the devices never run out of work. After a DivergedError
        nothing was saved from that step on.
        """
        saver = self.saver
        config = saver.config
        recorder = saver.recorder
        step = start  # the caller has start < steps
        every = config.report.every
        # One interval late: the first multiple of `every` after `start` has nothing to report.
        first_report = min((start // every + 2) * every, config.steps)

        def first_steps() -> str:
            done = recorder.computed()
            steps = first_report - start
            return f"training, {done} of the {steps} steps before the first report are done"

        recorder.pace.start()
        with contextlib.ExitStack() as until_report:
            until_report.enter_context(progress(first_steps))
            for step in range(start + 1, config.steps + 1):
                with recorder.pace.counted("load"):
                    batch = next(saver.batches)
                self.profiler.before(step, state)
                state, metrics = self.train_step(state, *batch)
                recorder.add(step, **metrics)
                last = step == config.steps
                if self.eval_step is not None and (last or step % config.eval.every == 0):
                    recorder.add(step, **self.evaluation.run(self.eval_step, state.params))
                if step % every == 0:
                    recorder.report(step - every)
                if step == first_report:
                    until_report.close()
                self.profiler.after(step, state)
                saver.poll(step, state)
                # after the poll, which may name an earlier step's checkpoint
                saver.watchdog.progress(f"step {step}")
                stopping = self.stop.should_stop(step)
                if last or stopping or saver.is_due(step):
                    saver.save(step, state)
                if stopping:
                    break
        with progress(f"writing the checkpoint of step {step}"):
            saver.finish(step, state)
        return step


def changed_fields(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the fields of a configuration that differ from their defaults, by their sections."""
    defaults = dict(flatten(dataclasses.asdict(Config("", 0))))
    found = dict[str, dict[str, Any]]()
    for name, value in flatten(dataclasses.asdict(config)):
        if value != defaults[name]:
            section, _, field = name.rpartition(".")
            found.setdefault(section or "run", {})[field] = value
    return found


class Profiler:
    """A window of steps that JAX's profiler records. The host waits for the devices at both ends of
    the window.
    """

    def __init__(self, config: ProfileConfig, folder: Path, events: Events):
        self._first, self._last = config.start, config.start + config.steps - 1
        self._folder = folder
        self._events = events
        self._is_on = False

    def before(self, step: int, state: TrainState) -> None:
        """Starts the profile if the window begins with this step."""
        if step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._is_on = True

    def after(self, step: int, state: TrainState) -> None:
        """Ends the profile if the window ends with this step, and says where it is."""
        if self._is_on and step >= self._last:
            jax.block_until_ready(state)
            self.close()
            say(f"profile    steps {self._first} to {step}, in {self._folder}")
            self._events.add("profile", step=step)

    def close(self) -> None:
        """Ends the profile of a run that stops within the window."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
