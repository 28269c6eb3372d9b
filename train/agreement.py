"""Checks that all processes of a run were started alike and see the same files, before anything waits for another."""

import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.errors import InputError


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
