"""Compiles the steps of a run before the first of them, and notes what the compiled training step is like."""

import gzip
import time

import jax

from train.config import Config
from train.lifecycle.workdir import Workdir
from train.metrics.events import Events
from train.metrics.show import say
from train.step.dispatch import describe_dispatch
from train.step.trainer import Trainer, backend_limits_are_input_errors

_KINDS_OF_MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def compile_steps(
    trainer: Trainer, config: Config, work: Workdir, events: Events
) -> tuple[jax.stages.Compiled, jax.stages.Compiled | None]:
    """Compiles the training step and, if the run has validations, the evaluation step.

    The text of the training step is written to the workdir, where `train/report.py` reads it.
    """
    began = time.monotonic()
    with backend_limits_are_input_errors(config):
        train_step = trainer.compile_train_step()
        eval_step = trainer.compile_eval_step() if config.eval.every else None
    seconds = time.monotonic() - began
    say(f"compiled   the training step in {seconds:.1f} s")
    for line in describe_dispatch(train_step):
        say(f"dispatch   {line}")
    memory = train_step.memory_analysis()
    sizes = {kind: int(getattr(memory, f"{kind}_size_in_bytes", 0)) for kind in _KINDS_OF_MEMORY}
    events.add("compiled", seconds=round(seconds, 3), memory_bytes=sizes)
    text = train_step.as_text()
    if jax.process_index() == 0 and text:
        work.write_if_there_is_room(work.program, gzip.compress(text.encode(), mtime=0))
    return train_step, eval_step
