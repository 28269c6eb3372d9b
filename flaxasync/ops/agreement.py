"""What several processes agree on: what process 0 says, if all of them have the same settings.

Processes that trace different programs wait for each other for ever, so what a program depends on
is what process 0 knows, in all processes.
"""

import concurrent.futures
import functools
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

# seconds to wait for the other processes, as long as `jax.distributed.initialize` waits for them
LIMIT = 300.0


class Answer(NamedTuple):
    """What processes found when they asked each other. It is the same in all of them."""

    of_first: str  # what process 0 said
    # the first setting that differs, as "jax is not the same in process 0 and in process 3"
    difference: str | None


def has_several_processes() -> bool:
    """Says whether several processes share the devices, without opening the devices to find out."""
    from jax._src import distributed, xla_bridge

    if xla_bridge.backends_are_initialized():
        return jax.process_count() > 1
    return (distributed.global_state.num_processes or 1) > 1


def ask_first_process(settings: Mapping[str, str], own: str) -> Answer:
    """Asks process 0 for its text, and compares settings; all processes must call this.

    Args:
      settings: What must be the same in all processes, by the same names.
      own: What this process would say.

    Raises:
      RuntimeError: The other processes did not ask within `LIMIT` seconds.
    """
    digests = np.array([zlib.crc32(text.encode()) for text in settings.values()], np.uint32)
    of_all, of_first = _within_limit(functools.partial(exchange, digests, own))
    for process, position in np.argwhere(of_all != of_all[0]):
        name = [*settings][position]
        difference = f"{name} is not the same in process 0 and in process {process}"
        return Answer(of_first, difference)
    return Answer(of_first, None)


def exchange(digests: np.ndarray, own: str) -> tuple[np.ndarray, str]:
    """Returns the digests of all processes [processes, settings], and the text of process 0."""
    of_all = multihost_utils.process_allgather(digests)
    text = np.frombuffer(own.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    # What other processes than 0 give is not read.
    of_first = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    return of_all, np.asarray(of_first).tobytes().decode()


def _within_limit[T](ask: Callable[[], T]) -> T:
    """Returns what the processes answer, or raises RuntimeError if some do not within `LIMIT`
    seconds.

    They are asked on another thread, because this one may trace a program on another mesh.
    """
    answer = concurrent.futures.Future[T]()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(LIMIT)
    except TimeoutError as error:
        raise RuntimeError(
            "the processes did not agree on the kernels to trust: not all of them asked within "
            f"{LIMIT:g} s; call flaxasync.ops.trust.known in all of them, after "
            "jax.distributed.initialize()"
        ) from error
