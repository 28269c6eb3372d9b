"""The start-up check: whether a call of the compiled training step makes the host wait, or calls Python on the host.

The devices stay busy only if the host dispatches a step in less time than the devices need to run it. A print or a
callback in the model can prevent that without any error, so the compiled program is searched for them before the first
step.
"""

import jax

from flaxasync.check import check_async_compatible


def describe_dispatch(train_step: jax.stages.Compiled) -> list[str]:
    """Describes what in a compiled step makes the host wait or calls it.

    Returns:
      The lines to print: the finding with its reasons, then the remedies. Empty if the step never involves the host.
    """
    info = check_async_compatible(train_step)
    if info.compatible and not info.has_host_callbacks:
        return []
    finding = {
        True: "the training step calls the host",
        False: "the host waits in every training step",
        None: "it cannot be told whether the host waits in every training step",
    }[info.compatible]
    return [f"{finding}: {'; '.join(info.reasons)}", *(f"do: {remedy}" for remedy in info.remedies)]
