"""Files made of results: `save_picture` draws timelines and simulated runs, `save_trace` writes Chrome traces.

The classes of results hold data only, and the modules that make results do not import this file.
"""

from collections.abc import Sequence
from typing import Any

from flaxasync.check.estimate.picture import draw_timelines
from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.estimate.trace import write_trace
from flaxasync.check.player.picture import draw_runs
from flaxasync.check.player.result import Result


def save_picture(
    results: Timeline | Result | Sequence[Timeline] | Sequence[Result], path: Any, *, titles: Sequence[str] = ()
) -> None:
    """Draws results as a PNG, on one scale of time. Timelines are below one another, and simulated runs side by side.

    Args:
      results: What `timeline` or `play` returned, or several of one kind.
      path: The file. Its folder is made if it does not exist.
      titles: A title for each result; the name of its program by default.

    Raises:
      ValueError: `results` is empty, or mixes the two kinds, or is something else.
      ImportError: matplotlib is not installed.
    """
    several: list[Any] = [results] if isinstance(results, Timeline | Result) else list(results)
    kinds = {type(result) for result in several}
    if kinds == {Timeline}:
        draw_timelines(several, path, titles=titles)
    elif kinds == {Result}:
        draw_runs(several, path, titles=titles)
    else:
        got = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        raise ValueError(f"results must be of timeline, or of play, and not of both: got {got}")


def save_trace(result: Timeline | Result, path: Any) -> None:
    """Writes a Chrome trace, the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
    write_trace(result.timeline() if isinstance(result, Result) else result, path)
