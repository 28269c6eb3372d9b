"""A run from its start to its end: opens its parts, continues it, trains, and generates the sample.

`train/run.py` imports this file after the command line has been checked, because it imports JAX.
"""

import contextlib
import dataclasses

import jax

from train.checkpoints.init_from import load_first_state
from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import Record, RunIdentity, identify_run
from train.checkpoints.saver import Saver
from train.config import flatten
from train.config.command import Command
from train.data.batches import TrainingBatches, split
from train.data.corpus import open_corpora
from train.data.identity import HashCache, identify
from train.lifecycle.agreement import agree_on_kernels, require_same
from train.lifecycle.compile_cache import configure_cache
from train.lifecycle.errors import COMPLETE, DivergedError
from train.lifecycle.files import write_atomically
from train.lifecycle.join import join
from train.lifecycle.loop import Loop
from train.lifecycle.mirror import Mirror, open_mirror
from train.lifecycle.monitor import Link
from train.lifecycle.signals import StopRequest
from train.lifecycle.watchdog import Watchdog
from train.lifecycle.workdir import Workdir, open_workdir
from train.lifecycle.working_copy import working_copy
from train.metrics.events import Events, provenance
from train.metrics.profiler import Profiler
from train.metrics.reporting import open_recorder, warn
from train.metrics.show import render_sample, say, show_setup
from train.step.compiled import compile_steps
from train.step.evaluation import Evaluation
from train.step.mesh import check_fits_mesh, configure_jax, make_mesh
from train.step.run_sample import generate
from train.step.trainer import Trainer, TrainState, backend_limits_are_input_errors, count_parameters


def train(command: Command, stop: StopRequest, link: Link | None = None) -> int:
    """Trains as the command line says, and returns the exit code.

    Args:
      command: The command line.
      stop: Tells when to stop.
      link: The monitor of this process, if several processes train together.

    Raises:
      RunError: The run ended for a reason that one paragraph explains.
    """
    config = command.config
    configure_jax(config.mesh)
    configure_cache(config)
    if link:
        join(link)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        fields = dict(flatten(dataclasses.asdict(config))) | {"resume": command.resume}
        require_same("the command line", fields)
        check_fits_mesh(config, mesh.shape)
        if link:
            agree_on_kernels()
        folder, seconds = working_copy(config.workdir), config.checkpoint.retry_seconds
        with (
            open_workdir(folder) as work,
            open_mirror(config.workdir, folder, seconds=seconds, say=say, warn=warn) as mirror,
        ):
            return Run(command, mesh, stop, work, mirror).run()


class Run:
    """One start of a run, whose workdir is locked."""

    def __init__(
        self, command: Command, mesh: jax.sharding.Mesh, stop: StopRequest, work: Workdir, mirror: Mirror | None = None
    ):
        """Opens and checks the data."""
        self.command, self.config, self.mesh, self.stop, self.work = command, command.config, mesh, stop, work
        self.mirror = mirror
        config = self.config
        self.corpora = open_corpora(config.data, vocab_size=config.model.vocab_size)
        self.training, self.validation = split(self.corpora, config)
        self.evaluation = Evaluation(self.validation, config, mesh)
        self.batches = TrainingBatches(self.training, config, mesh)

    def run(self) -> int:
        """Starts the run, continues it, or reports that it is complete; returns the exit code."""
        config, work = self.config, self.work
        keep, permanent = config.checkpoint.keep, config.checkpoint.permanent_every
        with contextlib.ExitStack() as stack:
            checkpoints = stack.enter_context(Checkpoints(work.checkpoints, keep=keep, permanent_every=permanent))
            changes = work.changes(config)
            start = checkpoints.choose(self.command.resume_step)
            require_same("the checkpoint to continue from (all processes must see the same workdir)", start)
            identity = self._identify()
            with backend_limits_are_input_errors(config):
                trainer = Trainer(config, self.mesh)
            if start >= config.steps and (work.sample.exists() or not config.eval.sample_tokens):
                checkpoints.require_same(start, identity, accept_change=config.data.accept_change)
                say(f"the run is complete: step {start} of {config.steps}, in {checkpoints.path(start)}")
                return COMPLETE
            parameters = count_parameters(trainer.abstract_state().params)
            show_setup(config, self.mesh, self.corpora, parameters=parameters, changes=changes)
            state, record, accepted = self._first_state(trainer, checkpoints, start, identity)
            self._set_aside(checkpoints, start)
            if self.mirror:
                self.mirror.take_over()
            events = Events(work.events if jax.process_index() == 0 else None, warn)
            stack.callback(events.close)
            events.add(
                "start",
                step=start,
                steps=config.steps,
                devices=[self.mesh.size, self.mesh.devices.flat[0].device_kind],
                mesh=dict(self.mesh.shape),
                parameters=parameters,
                changes=changes + accepted,
                **provenance(),
            )
            if start < config.steps:
                state, step = self._train(trainer, checkpoints, identity, events, state, start, record)
                if step < config.steps:
                    return self.stop.exit_code
            assert state is not None
            self._finish(trainer, state, checkpoints, events)
        return COMPLETE

    def _identify(self) -> RunIdentity:
        cache = HashCache(self.work.hashes)
        corpus = {name: identify(source, self.config.data.tokenizer, cache) for name, source in self.corpora.items()}
        require_same("the data", {name: dataclasses.asdict(identity) for name, identity in corpus.items()})
        return identify_run(self.config, corpus)

    def _first_state(
        self, trainer: Trainer, checkpoints: Checkpoints, start: int, identity: RunIdentity
    ) -> tuple[TrainState | None, Record | None, list[str]]:
        """Restores the checkpoint of step `start`, or takes the parameters of another run.

        Returns:
          The state, or None if it is to be drawn; the record of the checkpoint; and the changes that were accepted.
        """
        config = self.config
        if start:
            state, record, accepted = checkpoints.restore(
                start, trainer.abstract_state(), identity, accept_change=config.data.accept_change
            )
            self.batches.set_state(record.data)
            say(f"resumed    {checkpoints.path(start)}")
            for change in accepted:
                say(f"accepted   {change}")
            return trainer.complete(state), record, accepted
        if config.init_from is not None:
            state, path = load_first_state(config, trainer)
            say(f"parameters from {path}")
            return state, None, []
        return None, None, []

    def _set_aside(self, checkpoints: Checkpoints, start: int) -> None:
        """Moves what is later than the step to continue from into the folder set_aside/."""
        work = self.work
        # A copy on another machine does not have what is in set_aside/, so a store needs a folder for each start.
        folder = work.set_aside / self.mirror.start_name if self.mirror else work.set_aside
        if self.command.resume_step is not None and jax.process_index() == 0 and work.metrics.exists():
            work.keep_copy(work.metrics, folder)
        moved = checkpoints.set_aside(start, folder)
        if moved:
            say(f"set aside  moved {moved} to {folder}")

    def _train(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        identity: RunIdentity,
        events: Events,
        state: TrainState | None,
        start: int,
        record: Record | None,
    ) -> tuple[TrainState | None, int]:
        """Trains from step `start` to the end or until a stop is requested; returns the state and its step."""
        config, work, stop = self.config, self.work, self.stop
        train_step, eval_step = compile_steps(trainer, config, work, events)
        state = state or trainer.init()
        # Other processes may not know of the signal and would wait in step 1, so all stop together after a step.
        if stop.signal and jax.process_count() == 1:
            say(f"stopped by {stop.signal.name} before the first step; there was nothing new to save")
            return state, start
        if jax.process_index() == 0:
            work.begin(config)
        with contextlib.ExitStack() as stack:
            tokens = record.tokens if record else 0
            recorder = open_recorder(config, work, self.mesh, events, start=start, tokens_before=tokens)
            stack.callback(recorder.close)
            watchdog = stack.enter_context(Watchdog(config.report.hang_seconds, work.stacks))
            profiler = Profiler(config.profile, work.profile)
            stack.callback(profiler.close)
            saver = Saver(
                config, checkpoints, self.batches, recorder, events, identity, watchdog,
                warn=warn, before_save=self._before_save, after_save=self._after_save,
            )  # fmt: skip
            loop = Loop(
                config, trainer, train_step, eval_step, self.batches, self.evaluation, saver, recorder, stop, watchdog,
                profiler, events,
            )  # fmt: skip
            try:
                state, step = loop.run(state, start=start)
            except DivergedError as error:
                events.add("diverged", step=error.step, cause=str(error))
                raise _with_advice(error, checkpoints) from error
        if stop.signal and step < config.steps:
            events.add("stop", step=step, signal=stop.signal.name)
            say(f"stopped by {stop.signal.name} after step {step}, saved in {checkpoints.path(step)}")
            say(f"start again with --workdir {config.workdir} to continue")
        return state, step

    def _before_save(self) -> None:
        self.work.require_lock()
        if self.mirror:
            self.mirror.require_owner()

    def _after_save(self) -> None:
        if self.mirror:
            self.mirror.start_upload()

    def _finish(self, trainer: Trainer, state: TrainState, checkpoints: Checkpoints, events: Events) -> None:
        """Generates the sample, whose file marks the run as complete."""
        config, work = self.config, self.work
        if config.eval.sample_tokens:
            source, corpus = next(iter(self.corpora.items()))
            windows = self.validation[source] if len(self.validation[source]) else self.training[source]
            text = render_sample(corpus, *generate(trainer, state, windows[0], config))
            say(f"sample     (the model continues after \u2502)\n{text}")
            if jax.process_index() == 0:
                write_atomically(work.sample, text + "\n")
        events.add("complete", step=config.steps)
        say(f"done       {checkpoints.path(config.steps)}, {work.metrics}, {work.plot}, {work.tensorboard}")


def _with_advice(error: DivergedError, checkpoints: Checkpoints) -> DivergedError:
    """Returns the error with what a person can do about it."""
    checkpoints.wait()
    good = checkpoints.choose(None)
    where = (
        f"the last good checkpoint is {checkpoints.path(good)}, of step {good}"
        if good
        else "there is no good checkpoint, because none was due before that step"
    )
    return error.explained(
        f", so the run was stopped and nothing was saved from there on; {where}. Starting again repeats it: try a "
        "lower optimizer.learning_rate, or --skip.nonfinite True if single batches are bad."
    )
