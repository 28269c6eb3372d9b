"""Checks that all processes of a run were started alike and see the same files, before anything waits for another.

They also agree here which kernels they take.
"""

import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from flaxasync import mesh
from flaxasync.ops import trust
from train.lifecycle.errors import InputError
from train.metrics.show import say


def require_same(what: str, value: Any) -> None:
    """Checks that a value is the same in every process; every process raises if it is not.

    Args:
      what: What the value is, for the message.
      value: JSON data.

    Raises:
      InputError: It differs between processes; the message names those that differ from the first one.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
    everywhere = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest, np.uint32)))
    others = [process for process, theirs in enumerate(everywhere) if not np.array_equal(theirs, everywhere[0])]
    if others:
        raise InputError(
            f"{what} must be the same in all processes of a run: process {', '.join(map(str, others))} differs from "
            "process 0"
        )


def agree_on_kernels() -> None:
    """Makes all processes agree which kernels of their TPUs are trusted; the enclosing mesh says what these are.

    Processes that share chips cannot verify them before the run, as one process alone does: their verdicts are those
    that `python -m flaxasync.verify --distributed` has stored.
    """
    if mesh.platform() != "tpu":
        return
    evidence = trust.known(mesh.chip_name())
    if evidence.rule == "stored" and trust.PASSED not in evidence.verdicts.values():
        say(
            f"verify     no kernel has passed in every process; `{trust.COMMAND} --distributed`, started on every host "
            "before the run, verifies them"
        )
