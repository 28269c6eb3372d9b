"""`make_async_aot_caller`: a caller of compiled functions that refuses those which would hold the host.

A loop that relies on steps being dispatched ahead makes its step with this function once, before the first iteration.
If the step would hold the host, the loop gets an error with the line of the callback instead of a slow run.

The "Async AOT Dispatch" study bypassed JAX's Python dispatch, because it assumed that this path causes the waiting.
With jax 0.12 on CPUs that is not so (docs/dispatch.md): a pure function does not wait on that path, and a callback
waits on the C++ path. This caller therefore makes JAX's own call, with all of its checks.
"""

import dataclasses
from typing import Any

from flaxasync.check.dispatch.compatibility import DispatchInfo, check_async_compatible


@dataclasses.dataclass(frozen=True)
class AsyncCaller:
    """Calls a compiled function.

    Attributes:
      compiled: The function.
      info: What `check_async_compatible` found in it.
      reason: What is gained by calling it through this object.
    """

    compiled: Any
    info: DispatchInfo
    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def make_async_aot_caller(compiled: Any) -> AsyncCaller:
    """Returns a caller of a compiled function whose calls do not make the host wait, or raises an error.

    The calls are not faster than those of `compiled` itself. Use this function if a compiled function that makes the
    host wait should be an error.

    Args:
      compiled: What `jitted.lower(*args).compile()` returned.

    Returns:
      The caller. `.reason` says what it gains.

    Raises:
      ValueError: `compiled` is not a compiled function, or was compiled for a TPU that the machine does not have.
      NotImplementedError: The function has effects or callbacks, or makes the host wait for another reason.
    """
    info = check_async_compatible(compiled)
    if not callable(compiled):
        raise ValueError("compiled must be callable: got a program for a TPU that is not here")
    effects = info.has_host_callbacks or info.has_unordered_effects or info.ordered_effects
    if effects or info.compatible is False:
        raise NotImplementedError(
            f"no way of calling it keeps the host from its effects or its waiting: {'; '.join(info.reasons)}; "
            f"{'; '.join(info.remedies) or 'take the callback out of the function'}"
        )
    if info.compatible:
        reason = "nothing is gained: JAX's own call of it returns while the devices work, and this makes the same call"
    else:
        reason = f"nothing is known to be gained, for it cannot be told whether it waits: {'; '.join(info.reasons)}"
    return AsyncCaller(compiled, info, reason)
