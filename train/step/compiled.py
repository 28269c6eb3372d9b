"""Compiles the steps of a run before the first of them, and notes what the compiled training step is like.

The devices stay busy only if the host dispatches a step in less time than the devices need to run it. A print or a
callback in the model can prevent that without any error, so the compiled program is searched for them.
"""

import gzip
import time

import jax

from flaxasync.check import check_async_compatible
from train.config import Config
from train.lifecycle.workdir import Workdir
from train.metrics.events import Events
from train.metrics.show import say
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


def describe_dispatch(train_step: jax.stages.Compiled) -> list[str]:
    """Returns the lines to print about what in a compiled step makes the host wait or calls it."""
    info = check_async_compatible(train_step)
    if info.compatible and not info.has_host_callbacks:
        return []
    finding = {
        True: "the training step calls the host",
        False: "the host waits in every training step",
        None: "it cannot be told whether the host waits in every training step",
    }[info.compatible]
    return [f"{finding}: {'; '.join(info.reasons)}", *(f"do: {remedy}" for remedy in info.remedies)]
