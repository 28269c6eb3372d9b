"""`progress`: says on stderr what is under way, and for how long, while it takes longer than ten seconds.

    with progress("compiling for v5e:2x4"):
        ...

prints "flaxasync: compiling for v5e:2x4, 10 s so far" after ten seconds, and a line every ten seconds from then on.
What ends sooner prints nothing. Blocks may be nested: only the innermost one speaks, so that nothing is said twice. The
training script uses it, too.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SILENT_SECONDS = 10.0  # of the longest silence

# The blocks that are open in this process, the innermost last; those of other threads are among them.
_open: list[object] = []
_speaking = threading.Lock()  # held to change `_open`, and from the look at it until the line is said


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(
    what: str | Callable[[], str],
    *,
    silent: float = SILENT_SECONDS,
    say: Callable[[str], None] = to_stderr,
) -> Iterator[None]:
    """Says what the block does, and for how long, every `silent` seconds until it ends.

    Args:
      what: What is under way, as "compiling for v5e:2x4"; or a function that returns it, for work that can say how far
        it has come. The function is called in another thread.
      silent: The seconds from one line to the next, and to the first one.
      say: Prints a line; by default on stderr.
    """
    began = time.monotonic()
    ended = threading.Event()
    block = object()

    def speak() -> None:
        while not ended.wait(silent):
            with _speaking:
                if _open and _open[-1] is block:
                    doing = what if isinstance(what, str) else what()
                    say(f"flaxasync: {doing}, {time.monotonic() - began:.0f} s so far")

    speaker = threading.Thread(target=speak, name="flaxasync progress", daemon=True)
    with _speaking:
        _open.append(block)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        with _speaking:
            _open.remove(block)
        speaker.join()
