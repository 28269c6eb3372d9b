"""What the children of several hosts do together: they join, check that they run the same cases, and share results.

A case ends on all hosts at once, with the same outcome, so that all of them store the same verdicts and go on with the
same case. That is why a child waits for the others after each case; its parent ends it if that takes too long.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import jax

from flaxasync.ops.agreement import exchange
from flaxasync.verify.cases import Case

PORT = 8476  # of the coordinator where nothing names one, as for JAX
SILENT = 30  # seconds without a sign of life after which a child is taken for dead
LIMIT = 24 * 3600  # seconds: the parent ends a child that waits, after a time limit of its own


def join(number: int, limit: float) -> None:
    """Joins the children with this number of the other hosts, as JAX finds them, and waits `limit` seconds for them.

    Each number has a port of its own, because a child that hangs still holds its port when other hosts start the next.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    host, _, port = (address or f":{os.environ.get('JAX_COORDINATOR_PORT', PORT)}").rpartition(":")
    own_port = str(int(port) + number)
    os.environ["JAX_COORDINATOR_PORT"] = own_port
    try:
        jax.distributed.initialize(
            f"{host}:{own_port}" if address else None,
            initialization_timeout=int(limit),
            heartbeat_timeout_seconds=SILENT,
        )
    except ValueError as error:
        raise SystemExit(
            f"--distributed is for a TPU pod, SLURM or Open MPI, which JAX did not find: {error}"
        ) from error


def refusal(cases: Sequence[Case]) -> str | None:
    """Returns why the hosts cannot run their cases together, the same on all of them; None if all have the same."""
    texts = exchange("cases", hashlib.sha256(repr(cases).encode()).hexdigest(), LIMIT)
    if len(set(texts)) == 1:
        return None
    return "the hosts have different cases to run: start the same command on every host"


def share(number: int, outcome: dict[str, Any]) -> dict[str, Any]:
    """Returns the outcome of case `number` on all hosts, from that on this one, when all of them have it."""
    return combine([json.loads(text) for text in exchange(f"case {number}", json.dumps(outcome), LIMIT)])


def combine(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns an error of any host, or what one cannot do, or else the time of the slowest with the largest errors."""
    for kind in ("error", "unsupported"):
        for process, outcome in enumerate(outcomes):
            if kind in outcome:
                everywhere = all(other == outcome for other in outcomes)
                return outcome if everywhere else outcome | {kind: f"in process {process}: {outcome[kind]}"}
    measured = [outcome["measurement"] for outcome in outcomes]
    errors = {name: max(one["errors"][name] for one in measured) for name in measured[0]["errors"]}
    slowest = max(measured, key=lambda one: one["timing"]["seconds"] if one["timing"] else 0.0)
    return {"measurement": slowest | {"errors": errors}}
