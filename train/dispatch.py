"""The start-up check: does the compiled training step make the host wait, or call it?

The host must send off a step faster than the devices do it. A print or a callback in the model can end that without a
word, so it is looked for in the program before the first step.
"""

import jax

from flaxasync.check import check_async_compatible


def describe_dispatch(train_step: jax.stages.Compiled) -> list[str]:
    """Returns what of the step makes the host wait or calls it, and what to do, in lines; none when nothing does."""
    info = check_async_compatible(train_step)
    if info.compatible and not info.has_host_callbacks:
        return []
    verdict = {
        True: "the training step calls the host",
        False: "the host waits in every training step",
        None: "it cannot be told whether the host waits in every training step",
    }[info.compatible]
    return [f"{verdict}: {'; '.join(info.reasons)}", *(f"do: {remedy}" for remedy in info.remedies)]
