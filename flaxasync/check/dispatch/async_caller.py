"""`make_async_aot_caller`: the caller of the "Async AOT Dispatch" study, and why nothing is left for it to do.

The study went around JAX's Python dispatch, which it took for the cause of the waiting. Measured with jax 0.12 on CPUs
(docs/dispatch.md), a pure function sent down that path does not wait, and a callback sent down the C++ path does. So
the caller calls the compiled function as it is, with all of JAX's checks, and says so.
"""

import dataclasses
from typing import Any

from flaxasync.check.dispatch.compatibility import DispatchInfo, check_async_compatible


@dataclasses.dataclass(frozen=True)
class AsyncCaller:
    """Calls a compiled function.

    Attributes:
      compiled: the function.
      info: the verdict about it.
      reason: what is gained by calling it through this object.
    """

    compiled: Any
    info: DispatchInfo
    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def make_async_aot_caller(compiled: Any) -> AsyncCaller:
    """Returns a caller of a compiled function that does not make the host wait, or refuses.

    There is nothing to gain: where the host need not wait, `compiled(*args)` does not make it wait. Use this to be
    told so, or to be told what is in the way.

    Args:
      compiled: what `jitted.lower(*args).compile()` returned.

    Returns:
      The caller; `.reason` says what it gains.

    Raises:
      ValueError: `compiled` is no compiled function, or one for a device that is not here.
      NotImplementedError: the function has effects or callbacks, or makes the host wait for another reason.
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
