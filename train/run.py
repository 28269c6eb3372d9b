"""Trains a decoder with tensor parallelism: `python train/run.py [CONFIG] [--workdir DIR] [--section.field VALUE ...]`.

A run that is started again with the same workdir continues; see docs/train.md. With `--dry-run --topology v5e:2x4` the
script compiles the training step for those chips, which do not need to be there, and reports whether it fits and how
fast it would be.

Exit codes: 0 if the run is complete or was stopped by SIGTERM, 2 for bad input, 3 if the loss or the gradient is not
finite, 130 after Ctrl-C.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from train.checkpoint import Checkpoints
from train.config import Config, InputError, parse
from train.corpus import Corpus, open_corpus
from train.data import TrainingBatches, ValidationBatches, Windows, split
from train.dispatch import describe_dispatch
from train.dry_run import dry_run
from train.loop import Loop
from train.mesh import check_fits_mesh, configure_jax, make_mesh
from train.metrics import DivergedError, MetricsFile, Recorder, Sink, TensorBoard
from train.plot import LossPicture
from train.progress import make_progress
from train.sample import generate
from train.show import render_sample, say, show_setup
from train.signals import StopRequest
from train.step import Trainer, TrainState, backend_limits_are_input_errors, count_parameters
from train.verify import verify_first
from train.workdir import Workdir, architecture, write_atomically


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    try:
        command = parse(arguments)
        config = command.config
        if command.topology is not None:
            return dry_run(config, command.topology, command.trust)
        verify_first(config, command.verify)
        with StopRequest(shared=config.mesh.distributed) as stop:
            configure_jax(config.mesh)
            mesh = make_mesh(config.mesh)
            with jax.set_mesh(mesh):
                return run(config, mesh, stop)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; starting again continues from the last checkpoint, if there is one", file=sys.stderr)
        return 130


def run(config: Config, mesh: jax.sharding.Mesh, stop: StopRequest) -> int:
    """Checks the input, then starts the run, continues it, or reports that it is complete; returns the exit code."""
    check_fits_mesh(config, mesh.shape)
    corpus = open_corpus(config.data, vocab_size=config.model.vocab_size)
    training, validation = split(corpus, config)
    batches, validation_batches = TrainingBatches(training, config, mesh), ValidationBatches(validation, config, mesh)
    work = Workdir(Path(config.workdir))
    with work.locked(), Checkpoints(work.checkpoints, keep=config.checkpoint.keep) as checkpoints:
        changes = work.changes(config)
        start = checkpoints.choose(config.checkpoint.step)
        if start >= config.steps and (work.sample.exists() or not config.eval.sample_tokens):
            say(f"the run is complete: step {start} of {config.steps}, in {checkpoints.path(start)}")
            return 0
        with backend_limits_are_input_errors(config):
            trainer = Trainer(config, mesh)
        abstract = trainer.abstract_state()
        show_setup(config, mesh, corpus, parameters=count_parameters(abstract.params), changes=changes)
        if start:
            state, position = checkpoints.restore(start, abstract, architecture=architecture(config))
            batches.set_state(position)
            moved = checkpoints.set_aside(start, work.set_aside)
            say(f"resumed    {checkpoints.path(start)}" + (f"; moved {moved} to {work.set_aside}" if moved else ""))
        if start < config.steps:
            train_step = _compile(trainer, config)
            state = state if start else trainer.init()
            if stop.signal:
                say(f"stopped by {stop.signal.name} before the first step; there was nothing new to save")
                return stop.exit_code
            if jax.process_index() == 0:
                work.begin(config)
            recorder = _open_recorder(config, work, start)
            loop = Loop(config, trainer, train_step, batches, validation_batches, checkpoints, recorder, stop)
            try:
                with contextlib.closing(recorder):
                    state, step = loop.run(state, start=start)
            except DivergedError as error:
                _explain_divergence(error, checkpoints)
                return 3
            if stop.signal and step < config.steps:
                say(f"stopped by {stop.signal.name} after step {step}, saved in {checkpoints.path(step)}")
                say(f"start again with --workdir {work.root} to continue")
                return stop.exit_code
        _finish(config, work, trainer, state, corpus, validation if len(validation) else training)
        say(f"done       {checkpoints.path(config.steps)}, {work.metrics}, {work.plot}, {work.tensorboard}")
    return 0


def _compile(trainer: Trainer, config: Config) -> jax.stages.Compiled:
    began = time.monotonic()
    with backend_limits_are_input_errors(config):
        compiled = trainer.compile_train_step()
    say(f"compiled   the training step in {time.monotonic() - began:.1f} s")
    for line in describe_dispatch(compiled):
        say(f"dispatch   {line}")
    return compiled


def _open_recorder(config: Config, work: Workdir, start: int) -> Recorder:
    """Opens the recorder and its sinks; only the first of several processes has sinks."""
    sinks: list[Sink] = []
    if jax.process_index() == 0:
        sinks = [
            MetricsFile(work.metrics, start=start),
            TensorBoard(work.tensorboard, start=start),
            LossPicture(work.metrics, work.plot),
            make_progress(start=start, steps=config.steps),
        ]
    return Recorder(sinks, tokens_per_step=config.data.batch_size * config.data.sequence_length)


def _explain_divergence(error: DivergedError, checkpoints: Checkpoints) -> None:
    checkpoints.wait()
    good = checkpoints.choose(None)
    where = (
        f"the last good checkpoint is {checkpoints.path(good)}, of step {good}"
        if good
        else "there is no good checkpoint, because none was due before that step"
    )
    print(
        f"error: {error}, so the run was stopped and nothing was saved from there on; {where}. "
        "Starting again repeats it: try a lower optimizer.learning_rate.",
        file=sys.stderr,
    )


def _finish(
    config: Config, work: Workdir, trainer: Trainer, state: TrainState, corpus: Corpus, prompt: Windows
) -> None:
    """Generates the sample, whose file marks the run as complete."""
    if config.eval.sample_tokens:
        text = render_sample(corpus, *generate(trainer, state, prompt[0], config))
        say(f"sample     (the model continues after \u2502)\n{text}")
        if jax.process_index() == 0:
            write_atomically(work.sample, text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
