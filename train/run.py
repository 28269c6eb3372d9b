"""Trains a decoder, tensor-parallel: `python train/run.py [CONFIG] [--workdir DIR] [--section.field VALUE ...]`.

Start it again with the same workdir and the run continues; see docs/train.md. With `--dry-run --topology v5e:2x4` it
compiles the training step for those chips, which need not be there, and says whether it fits and how fast it would be.

Exit codes: 0 done, complete already, or stopped by SIGTERM; 2 bad input; 3 the loss is not finite; 130 Ctrl-C.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from models.transformer import check_fits
from train.checkpoint import Checkpoints
from train.config import Config, InputError, parse
from train.corpus import Corpus, open_corpus
from train.data import TrainingBatches, ValidationBatches, Windows, split
from train.dispatch import describe_dispatch
from train.dry_run import dry_run
from train.loop import Loop
from train.mesh import make_mesh, open_platform
from train.metrics import DivergedError, MetricsFile, Recorder, Sink, TensorBoard
from train.plot import LossPicture
from train.progress import make_progress
from train.sample import generate
from train.show import render_sample, say, show_setup
from train.signals import StopRequest
from train.step import Trainer, TrainState, count_parameters
from train.workdir import Workdir, architecture, write_atomically


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    try:
        command = parse(arguments)
        config = command.config
        if command.topology is not None:
            return dry_run(config, command.topology)
        with StopRequest(shared=config.mesh.distributed) as stop:
            open_platform(config.mesh)
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
    """Checks everything, then begins, continues, or says that nothing is left to do; returns the exit code."""
    try:
        check_fits(
            config.model,
            sequence_length=config.data.sequence_length,
            mesh_shape=dict(mesh.shape),
            context_layout=config.mesh.context_layout,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    corpus = open_corpus(config.data, vocab_size=config.model.vocab_size)
    training, validation = split(corpus, config)
    batches, held_out = TrainingBatches(training, config, mesh), ValidationBatches(validation, config, mesh)
    work = Workdir(Path(config.workdir))
    with work.locked(), Checkpoints(work.checkpoints, keep=config.checkpoint.keep) as checkpoints:
        changes = work.changes(config)
        start = checkpoints.choose(config.checkpoint.step)
        if start >= config.steps and (work.sample.exists() or not config.eval.sample_tokens):
            say(f"the run is complete: step {start} of {config.steps}, in {checkpoints.path(start)}")
            return 0
        with _unsupported_is_bad_input(config):
            trainer = Trainer(config, mesh)
        abstract = trainer.abstract_state()
        show_setup(config, mesh, corpus, parameters=count_parameters(abstract.params), changes=changes)
        if start:
            state, position = checkpoints.restore(start, abstract, architecture=architecture(config))
            batches.set_state(position)
            aside = checkpoints.set_aside(start, work.set_aside)
            say(f"resumed    {checkpoints.path(start)}" + (f"; moved {aside} to {work.set_aside}" if aside else ""))
        if start < config.steps:
            train_step = _compile(trainer, config)
            state = state if start else trainer.init()
            if stop.signal:
                say(f"stopped by {stop.signal.name} before the first step; there was nothing new to save")
                return stop.exit_code
            if jax.process_index() == 0:
                work.begin(config)
            recorder = _open_recorder(config, work, start)
            loop = Loop(config, trainer, train_step, batches, held_out, checkpoints, recorder, stop)
            try:
                with contextlib.closing(recorder):
                    state, step = loop.run(state, start=start)
            except DivergedError as error:
                _explain(error, checkpoints)
                return 3
            if stop.signal and step < config.steps:
                say(f"stopped by {stop.signal.name} after step {step}, saved in {checkpoints.path(step)}")
                say(f"start again with --workdir {work.root} to continue")
                return stop.exit_code
        _finish(config, work, trainer, state, corpus, validation if len(validation) else training)
        say(f"done       {checkpoints.path(config.steps)}, {work.metrics}, {work.plot}, {work.tensorboard}")
    return 0


@contextlib.contextmanager
def _unsupported_is_bad_input(config: Config) -> Iterator[None]:
    """The layers say with NotImplementedError that the backend that was named cannot serve them."""
    try:
        yield
    except NotImplementedError as error:
        raise InputError(f"backend={config.backend} cannot serve this run: {error}") from error


def _compile(trainer: Trainer, config: Config) -> jax.stages.Compiled:
    began = time.monotonic()
    with _unsupported_is_bad_input(config):
        compiled = trainer.compile_train_step()
    say(f"compiled   the training step in {time.monotonic() - began:.1f} s")
    for line in describe_dispatch(compiled):
        say(f"dispatch   {line}")
    return compiled


def _open_recorder(config: Config, work: Workdir, start: int) -> Recorder:
    """Returns the recorder with its sinks; only the first of several processes writes anything."""
    sinks: list[Sink] = []
    if jax.process_index() == 0:
        sinks = [
            MetricsFile(work.metrics, start=start),
            TensorBoard(work.tensorboard, start=start),
            LossPicture(work.metrics, work.plot),
            make_progress(start=start, steps=config.steps),
        ]
    return Recorder(sinks, tokens_per_step=config.data.batch_size * config.data.sequence_length)


def _explain(error: DivergedError, checkpoints: Checkpoints) -> None:
    checkpoints.wait()
    good = checkpoints.choose(None)
    where = f"{checkpoints.path(good)}, of step {good}" if good else "none: none was due before"
    print(
        f"error: {error}, so the run was stopped and nothing was saved from there on; the last good checkpoint is "
        f"{where}. Starting again repeats it: try a lower optimizer.learning_rate.",
        file=sys.stderr,
    )


def _finish(
    config: Config, work: Workdir, trainer: Trainer, state: TrainState, corpus: Corpus, prompt: Windows
) -> None:
    """Generates the sample, which marks the run as finished."""
    if config.eval.sample_tokens:
        text = render_sample(corpus, *generate(trainer, state, prompt[0], config))
        say(f"sample     (the model goes on after \u2502)\n{text}")
        if jax.process_index() == 0:
            write_atomically(work.sample, text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
