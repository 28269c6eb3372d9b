"""What several processes agree on before anything is traced: they exchange texts through JAX's coordinator.

Processes that trace different programs wait for each other for ever, so what they read on their own machines must not
decide what they trace. `jax.distributed.initialize` connects every process with a coordinator, which keeps what each of
them says and decides whether all have said it in time. Nothing runs on the devices.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

LIMIT = 300
"""Seconds to wait for the other processes, as long as `jax.distributed.initialize` waits for them."""
NAMED = 3  # verdicts that a message names

type Rule = Literal["all", "none", "stored"]


class MeetingError(RuntimeError):
    """The processes did not exchange anything."""


class NoCoordinatorError(MeetingError):
    """The processes cannot exchange anything; every process raises it, or none does."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What one process knows about the kernels of a chip, or what all processes agree on.

    Attributes:
      rule: Whether every kernel is trusted, none, or those with a stored verdict "PASS".
      verdicts: The verdict of each kernel and class of rings, under the names of `flaxasync.ops.trust.key`: "PASS", or
        that of a case that failed.
      times: The measured seconds of each backend, for each call under a name of `flaxasync.ops.trust.call_key`.
    """

    rule: Rule
    verdicts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    times: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


def has_several_processes() -> bool:
    """Says whether several processes share the devices, without opening the devices to find out."""
    from jax._src import distributed, xla_bridge

    if xla_bridge.backends_are_initialized():
        return jax.process_count() > 1
    return (distributed.global_state.num_processes or 1) > 1


def exchange(topic: str, text: str, limit: float) -> list[str]:
    """Returns the texts of all processes, in their order.

    Every process must call this once with the same topic. One that comes after the limit of another raises, too.

    Args:
      topic: What the texts are about.
      text: The text of this process.
      limit: Seconds to wait for the other processes.

    Raises:
      MeetingError: A process did not come in time, or the processes have no coordinator.
    """
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None:
        raise NoCoordinatorError("they have no coordinator: call jax.distributed.initialize() in every process")
    try:
        state.client.key_value_set(f"flaxasync/{topic}/{state.process_id}", text)
        state.client.wait_at_barrier(f"flaxasync/{topic}", int(limit * 1000))
        return [state.client.key_value_try_get(f"flaxasync/{topic}/{i}") for i in range(state.num_processes)]
    except jax.errors.JaxRuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise MeetingError(f"not all of them came within {limit:g} s: {reason}") from error


def agree(own: Evidence, machine: Mapping[str, Any]) -> tuple[Evidence, str]:
    """Returns what all processes agree on about the kernels of a chip, and why that is less than they know, or "".

    Args:
      own: What this process knows.
      machine: The chip, the software and its options, the fields of `flaxasync.ops.trust.Machine`.
    """
    said = {"rule": own.rule, "verdicts": dict(own.verdicts), "times": dict(own.times), "machine": dict(machine)}
    try:
        texts = exchange(f"kernels of {machine['chip']}", json.dumps(said), LIMIT)
    except MeetingError as error:
        # What another process set is not known. Without a coordinator the variable is the only way to trust a kernel.
        follows = isinstance(error, NoCoordinatorError) and own.rule != "stored"
        lack = "each follows its own FLAXASYNC_VERIFIED" if follows else "no kernel is trusted"
        rule = own.rule if follows else "none"
        return Evidence(rule), f"the processes did not agree on the kernels to trust, and {lack}: {error}"
    return combine([json.loads(text) for text in texts])


def combine(said: Sequence[Mapping[str, Any]]) -> tuple[Evidence, str]:
    """Returns what `agree` returns, from what each process said. All processes get the same from the same texts.

    The times are those of process 0, because two measurements are never equal.
    """
    settings = [{"FLAXASYNC_VERIFIED": one["rule"]} | one["machine"] for one in said]
    for process, theirs in enumerate(settings):
        for name in sorted({*settings[0], *theirs}):
            first, other = settings[0].get(name), theirs.get(name)
            if first != other:
                return Evidence("none"), (
                    f"the processes differ, and none of them trusts a kernel: {name} is {first!r} in process 0 and "
                    f"{other!r} in process {process}; it must be the same in all"
                )
    rule, times, verdicts = said[0]["rule"], said[0]["times"], [one["verdicts"] for one in said]
    agreed: dict[str, str] = {}
    lacking = []
    for name in sorted({name for one in verdicts for name in one}):
        texts = [one.get(name) for one in verdicts]
        if all(texts):
            agreed[name] = next((text for text in texts if text != "PASS"), "PASS")
        passed = [text == "PASS" for text in texts]
        if len(set(passed)) > 1:
            process = passed.index(not passed[0])
            lacking.append(f"{name} is {texts[0] or 'missing'} in process 0 and {texts[process] or 'missing'} in "
                           f"process {process}")  # fmt: skip
    if not lacking:
        return Evidence(rule, agreed, times), ""
    more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
    differences = ", ".join(lacking[:NAMED]) + more
    return Evidence(rule, agreed, times), (
        f"the processes have different verdicts, and trust only kernels that passed in all of them: {differences}"
    )
