"""Files made of results: `save_picture` draws timelines and simulated runs, `save_trace` writes Chrome traces.

The classes of results hold data only, and the modules that make results do not import this file.
"""

from collections.abc import Sequence
from typing import Any

from flaxasync.check.estimate.picture import draw_timeline, draw_timelines
from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.estimate.trace import write_trace
from flaxasync.check.player.result import Result


def save_picture(
    results: Timeline | Result | Sequence[Timeline | Result], path: Any, *, titles: Sequence[str] = ()
) -> None:
    """Draws results as a PNG: one with its longest loops, or several below one another on one scale of time.

    Args:
      results: What `timeline` or `play` returned, or several of them.
      path: The file. Its folder is made if it does not exist.
      titles: A title for each of several results; the name of its program by default.

    Raises:
      ValueError: `results` is empty, or has something else in it.
      ImportError: matplotlib is not installed.
    """
    if isinstance(results, Timeline | Result):
        draw_timeline(_timeline(results), path)
    elif not results:
        raise ValueError("results must hold what timeline or play returned: got nothing")
    else:
        draw_timelines([_timeline(result) for result in results], path, titles=titles)


def save_trace(result: Timeline | Result, path: Any) -> None:
    """Writes a Chrome trace, the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
    write_trace(_timeline(result), path)


def _timeline(result: Any) -> Timeline:
    if not isinstance(result, Timeline | Result):
        raise ValueError(f"results must be what timeline or play returned: got {type(result).__name__}")
    return result.timeline() if isinstance(result, Result) else result
