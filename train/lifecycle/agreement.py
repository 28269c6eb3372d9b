"""What all processes of a run agree on before one waits for another: how they were started, and their kernels."""

import hashlib
import json
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from flaxasync import mesh
from flaxasync.ops import trust
from train.lifecycle.errors import InputError
from train.metrics.show import say


def require_same(values: dict[str, Any]) -> None:
    """Checks that values, which are JSON data, are those of the first process.

    Raises:
      InputError: One is not; the message names it by its key.
    """
    for name, value in values.items():
        digest = hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
        try:
            multihost_utils.assert_equal(np.frombuffer(digest, np.uint32))
        except AssertionError as error:
            raise InputError(f"the {name} must be the same in all processes of a run") from error


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
