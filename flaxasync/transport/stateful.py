"""The permute on Refs: the caller owns both buffers, so XLA has none to copy, free or move. For
TPUs only.

```python
x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))
sems = ppermute_start_stateful(x_ref, y_ref, "model")
z = x_ref[...] * 2                                              # meanwhile x_ref may be read; neither may be written
ppermute_done_stateful(*sems, x_ref, y_ref)
y = y_ref[...]
```

Both kernels read and write both Refs, so they run in program order with each other and with
everything else that uses the Refs. The body of a loop makes two hops, there and back. A pair is
kept even if nothing uses its result, also in a loop.

The Refs must be whole Refs, of `jax.new_ref` or those of a function that `pl.run_state` calls, at
whose end their lives end. A view of a Ref would be copied before the DMA.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.ffi
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import PyTree

from flaxasync import mesh
from flaxasync.ring import Block, Update
from flaxasync.transport import pair, pallas, schedule
from flaxasync.transport.pair import Ref, Semaphore

type Semaphores = tuple[Semaphore, Semaphore]


def ppermute_start_stateful(
    x_ref: Ref, y_ref: Ref, axis_name: str, shift: int = 1, *, collective_id: int | None = None
) -> Semaphores:
    """Begins sending what `x_ref` holds to `y_ref` of the device `shift` positions onward on
    `axis_name`. TPU only.

    Args:
      x_ref: A Ref of `jax.new_ref`. Until the done it may be read, but not written.
      y_ref: Another Ref, of the same shape and dtype. Until the done it may be neither read nor
        written.
      axis_name: A mesh axis of R devices that the enclosing `shard_map` maps.
      shift: Device i sends to device (i + shift) % R.
      collective_id: The id of the entry barrier; by default one that no other kernel of the program
        has.

    Returns:
      The semaphores of the two ends, for `ppermute_done_stateful(*sems, x_ref, y_ref)`.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; the two are the same Ref, are views, or differ in
        shape or dtype.
      NotImplementedError: The mesh is not made of TPUs, or TPU DMAs cannot move such an array.
    """
    size = mesh.mapped_axis_size("ppermute_start_stateful", axis_name)
    mesh.check_tpu(
        "ppermute_start_stateful", "ppermute_start with backend='xla', which runs on every device"
    )
    _check_refs("ppermute_start_stateful", x_ref, y_ref)
    pair.check_movable(
        "ppermute_start_stateful", jax.typeof(x_ref[...]), "ppermute_start with backend='xla'"
    )
    start_body = pallas.permute(axis_name, shift % size, collective_id).start_body
    sems, (x_ref[...], y_ref[...]), _ = pair.start_kernel(
        "ppermute_stateful_start",
        start_body,
        (x_ref[...], y_ref[...]),
        semaphores=2,
        collective_id=collective_id,
        sent=x_ref.size * x_ref.dtype.itemsize,
    )
    return sems[0], sems[1]


def ppermute_done_stateful(
    send_sem: Semaphore, recv_sem: Semaphore, x_ref: Ref, y_ref: Ref
) -> None:
    """Waits until `x_ref` has been sent and `y_ref` has arrived. After that, both may be read and
    written again.

    Args:
      send_sem, recv_sem: The semaphores that `ppermute_start_stateful` returned.
      x_ref, y_ref: The Refs that it was given.

    Raises:
      ValueError: The two are the same Ref, are views, or differ in shape or dtype.
    """
    _check_refs("ppermute_done_stateful", x_ref, y_ref)
    contents = (x_ref[...], y_ref[...])
    semaphores = (send_sem, recv_sem)
    x_ref[...], y_ref[...] = pair.done_kernel(
        "ppermute_stateful_done",
        pallas.wait_sent_and_received,
        contents,
        semaphores,
        returned=(0, 1),
    )
    keep()


def keep() -> None:
    """Keeps the loop, the branch or the function in which it is called, even if nothing uses a
    result of it.
    """
    _keep_p.bind()


def tie_refs(*refs: Ref, values: PyTree = None) -> Any:
    """Orders all earlier operations on `refs`, and the computation of `values`, before all later
    operations on them.

    Operations on one Ref keep their order without it; operations on two different Refs do not. The
    refs are whole Refs, and the values a pytree of arrays and numbers, which is returned.
    """
    contents, values = schedule.tie([ref[...] for ref in refs], values)
    for ref, content in zip(refs, contents, strict=True):
        ref[...] = content
    return values


@dataclasses.dataclass(frozen=True)
class StatefulTransport:
    """A `flaxasync.ring.Transport` that moves blocks between Refs, which are created outside the
    loop.
    """

    def open(self, block: Block, axis_name: str, *, shift: int) -> "RefChannel":
        arrays, structure = jax.tree.flatten(block)
        return RefChannel(tuple(map(_new_pair, arrays)), structure, axis_name, shift)

    def check_unroll(self, unroll: int) -> None:
        """Raises ValueError if a loop body would not leave each Ref in the role, source or
        destination, that it had.
        """
        if unroll % 2:
            raise ValueError(
                f"a loop of Refs needs an even unroll: got unroll={unroll}. Source and destination "
                "are two Refs that change roles every turn. Leave unroll out, or use backend='xla'"
            )


@dataclasses.dataclass(frozen=True)
class RefChannel:
    """The channel of a block in pairs of Refs, which swap roles in each turn. A loop carries only
    the semaphores.
    """

    pairs: tuple[tuple[Ref, Ref], ...]
    structure: Any
    axis_name: str
    shift: int

    def start(self) -> list[Semaphores]:
        return self._start(0)

    def read(self, state: list[Semaphores], turn: int) -> Block:
        return jax.tree.unflatten(self.structure, [refs[turn % 2][...] for refs in self.pairs])

    def tie(self, state: list[Semaphores], values: PyTree) -> tuple[list[Semaphores], Any]:
        return state, tie_refs(*(ref for refs in self.pairs for ref in refs), values=values)

    def hop(self, state: list[Semaphores], update: Update, turn: int) -> list[Semaphores]:
        self._done(state, turn)
        if update is not None:
            for refs, x in zip(
                self.pairs, jax.tree.leaves(update(self.read(state, turn + 1))), strict=True
            ):
                refs[(turn + 1) % 2][...] = x
        return self._start(turn + 1)

    def finish(self, state: list[Semaphores], update: Update, turn: int) -> Block:
        self._done(state, turn)
        block = self.read(state, turn + 1)
        if update is None:
            return block
        return update(block)

    def _start(self, turn: int) -> list[Semaphores]:
        ends = [(refs[turn % 2], refs[(turn + 1) % 2]) for refs in self.pairs]
        return [ppermute_start_stateful(*refs, self.axis_name, self.shift) for refs in ends]

    def _done(self, state: list[Semaphores], turn: int) -> None:
        for sems, refs in zip(state, self.pairs, strict=True):
            ppermute_done_stateful(*sems, refs[turn % 2], refs[(turn + 1) % 2])


def _new_pair(x: jax.Array) -> tuple[Ref, Ref]:
    """Returns a Ref that holds `x`, and one for what arrives.

    The memory of the second Ref is tied to `x`, because the gradient of a scan hoists what depends
    on no variable of the scan. An empty array depends on nothing, and a Ref that was hoisted cannot
    be returned to the scan.
    """
    empty = mesh.vary_like(lax.empty(x.shape, x.dtype), x)
    x, empty = schedule.tie(x, empty)
    return jax.new_ref(x), jax.new_ref(empty)


def is_whole_ref(ref: object) -> bool:
    """Says whether this is a Ref, and neither a view of one nor an array."""
    return isinstance(ref, jax.core.Tracer | jax.Ref) and hasattr(jax.typeof(ref), "inner_aval")


def _check_refs(caller: str, x_ref: Ref, y_ref: Ref) -> None:
    for name, ref in (("x_ref", x_ref), ("y_ref", y_ref)):
        if not is_whole_ref(ref):
            raise ValueError(
                f"{caller} needs {name} to be a whole Ref: got {type(ref).__name__}; make one with "
                "jax.new_ref"
            )
    if x_ref is y_ref:
        raise ValueError(
            f"{caller} was given one Ref as x_ref and y_ref: what arrives would overwrite what is "
            "sent"
        )
    if (x_ref.shape, x_ref.dtype) != (y_ref.shape, y_ref.dtype):
        raise ValueError(
            f"{caller} needs two Refs of one type: got x_ref {x_ref.dtype}{list(x_ref.shape)} and "
            f"y_ref {y_ref.dtype}{list(y_ref.shape)}"
        )


# This operation does nothing and may not be removed, so it keeps the loop that contains it. XLA
# keeps a `pallas_call` with side effects by itself, but JAX drops a whole loop if neither a result
# nor an effect of the loop is needed.
_keep_p = Primitive("flaxasync_keep")
_keep_p.multiple_results = True
_keep_p.def_impl(list)
mlir.register_lowering(_keep_p, lambda context: [])


@_keep_p.def_effectful_abstract_eval
def _keep_effects() -> tuple[list, Any]:
    return [], _effects_of_a_call()


@functools.cache
def _effects_of_a_call() -> Any:
    """Returns the effects of a foreign call with side effects, which JAX keeps in loops, branches
    and gradients.
    """
    call = jax.ffi.ffi_call("flaxasync_keep", (), has_side_effect=True)
    return jax.make_jaxpr(lambda: call())().effects
