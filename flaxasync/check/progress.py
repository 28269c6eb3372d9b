"""`progress`: says on stderr what is under way, and for how long, while it takes longer than ten
seconds.

    with progress("training"):
        with progress("compiling the step"):
            ...

prints "flaxasync: training: compiling the step, 10 s so far" after ten seconds, and such a line
every ten seconds from then on. What ends sooner prints nothing. Anything that can be silent for
longer uses it; the training script, too.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SILENT_SECONDS = 10.0  # of the longest silence

type What = str | Callable[[], str]


class _OpenBlocks(threading.local):
    """The blocks that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[What] = []


_open = _OpenBlocks()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(what: What) -> Iterator[None]:
    """Says what the block does, and for how long, every ten seconds until it ends.

    Args:
      what: What is under way, as "compiling for v5e:2x4"; or a function that returns it, for work
        that can say how far it has come. The function is called in another thread.

    A block within another one adds what it does to the lines of the outermost one.
    """
    stack = _open.stack
    stack.append(what)
    try:
        with _speaker(stack) if len(stack) == 1 else contextlib.nullcontext():
            yield
    finally:
        stack.pop()


@contextlib.contextmanager
def _speaker(stack: list[What]) -> Iterator[None]:
    began = time.monotonic()
    ended = threading.Event()

    def speak() -> None:
        while not ended.wait(SILENT_SECONDS):
            # each once
            doing = dict.fromkeys(one if isinstance(one, str) else one() for one in list(stack))
            say(f"flaxasync: {': '.join(doing)}, {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=speak, name="flaxasync progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
