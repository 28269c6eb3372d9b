"""What several processes agree on before anything is traced: they exchange texts through JAX's
coordinator.

Processes that trace different programs wait for each other for ever, so what they read on their own
machines must not decide what they trace. `jax.distributed.initialize` connects them with a
coordinator. Nothing runs on the devices.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

PASSED = "PASS"
NAMED = 3  # differing verdicts that a message names


class MeetingError(RuntimeError):
    """The processes did not exchange anything."""


class NoCoordinatorError(MeetingError):
    """The processes cannot exchange anything; every process raises it, or none does."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What one process knows about the kernels of a chip, or what all processes agree on."""

    # which kernels are trusted: stored ones are those with the verdict "PASS"
    rule: Literal["all", "none", "stored"]
    # By the names of `flaxasync.ops.trust.key`: "PASS", or the verdict of a case that failed.
    verdicts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # By the names of `flaxasync.ops.trust.call_key`: the measured seconds of each backend.
    times: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def verdict(self, name: str) -> str | None:
        """Returns "PASS" if a kernel may be trusted, a verdict of the cases that failed, and None
        without any.
        """
        if self.rule == "stored":
            return self.verdicts.get(name)
        return PASSED if self.rule == "all" else None


def has_several_processes() -> bool:
    """Says whether several processes share the devices, without opening the devices to find out."""
    from jax._src import distributed, xla_bridge

    if xla_bridge.backends_are_initialized():
        return jax.process_count() > 1
    return (distributed.global_state.num_processes or 1) > 1


def exchange(topic: str, text: str, limit: float) -> list[str]:
    """Returns the texts of all processes, in their order; waits for them for `limit` seconds.

    Every process must call this once with the same topic. If one of them is late, or the
    coordinator fails or is missing, it raises MeetingError; so does a process that comes after the
    limit of another.
    """
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None:
        raise NoCoordinatorError(
            "they have no coordinator: call jax.distributed.initialize() in every process"
        )
    try:
        state.client.key_value_set(f"flaxasync/{topic}/{state.process_id}", text)
        state.client.wait_at_barrier(f"flaxasync/{topic}", int(limit * 1000))
        return [
            state.client.key_value_try_get(f"flaxasync/{topic}/{i}")
            for i in range(state.num_processes)
        ]
    except jax.errors.JaxRuntimeError as error:
        late = str(error).startswith("DEADLINE_EXCEEDED")
        what = f"not all of them came within {limit:g} s" if late else "their coordinator failed"
        raise MeetingError(f"{what}: {str(error).partition('\n')[0]}") from error


def combine(said: Sequence[Mapping[str, Any]]) -> tuple[Evidence, str]:
    """Returns what processes agree on, and why that is less than they know, or "", from what each
    said.

    All processes get the same from the same texts. The times are those of process 0: two
    measurements are never equal.
    """
    first = said[0]["settings"]
    for process, settings in enumerate(one["settings"] for one in said):
        for name in sorted({*first, *settings}):
            if first.get(name) != settings.get(name):
                return Evidence("none"), (
                    f"the processes differ, and none of them trusts a kernel: {name} is "
                    f"{first.get(name)!r} in process "
                    f"0 and {settings.get(name)!r} in process {process}; it must be the same in all"
                )
    verdicts = [one["verdicts"] for one in said]
    agreed = {}
    differences = []
    for name in sorted(set().union(*verdicts)):
        texts = [one.get(name, "missing") for one in verdicts]
        failed = [text for text in texts if text != PASSED]
        if "missing" not in texts:
            agreed[name] = failed[0] if failed else PASSED
        if 0 < len(failed) < len(texts):
            other = next(
                process
                for process, text in enumerate(texts)
                if (text == PASSED) != (texts[0] == PASSED)
            )
            differences.append(
                f"{name} is {texts[0]} in process 0 and {texts[other]} in process {other}"
            )
    evidence = Evidence(said[0]["rule"], agreed, said[0]["times"])
    if not differences:
        return evidence, ""
    more = f" and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
    return evidence, (
        "the processes have different verdicts, and trust only kernels that passed in all of them: "
        f"{', '.join(differences[:NAMED])}{more}"
    )
