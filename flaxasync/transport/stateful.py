"""The permute on Refs: the caller owns both buffers, so that XLA has none to copy, free or move. TPU only.

```python
x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))
sems = ppermute_start_stateful(x_ref, y_ref, "model")
z = x_ref[...] * 2                                              # read x_ref meanwhile; write neither
ppermute_done_stateful(*sems, x_ref, y_ref)
y = y_ref[...]
```

Both kernels read and write both Refs, so their order, and that of everything else that touches the Refs, is the order
of the program. A loop body makes two hops, there and back; or it makes one, and both buffers are the two slots of one
Ref, picked by the hop's parity (`new_slots`, `start_slots`, `done_slots`). A pair that nothing depends on is kept, in a
loop too.

Refs are those of `jax.new_ref`, and whole: a view of one would be copied before the DMA sees it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.ffi
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from flaxasync.transport import pair, pallas, schedule

type Semaphores = tuple[Any, Any]


def ppermute_start_stateful(
    x_ref: Any, y_ref: Any, axis_name: str, shift: int = 1, *, collective_id: int | None = None
) -> Semaphores:
    """Begins sending what x_ref holds to y_ref of the device `shift` places onward on `axis_name`.

    Args:
      x_ref: what is sent. It may be read, not written, until the done.
      y_ref: what is received. It may be neither read nor written until the done.
      axis_name: the mesh axis.
      shift: device i sends to device (i + shift) % R.
      collective_id: of the entry barrier; see `flaxasync.transport.pallas.start`.

    Returns:
      The send and the receive semaphore.

    Raises:
      ValueError: the two are one Ref, are views, or differ in shape or dtype; no `shard_map` maps `axis_name`.
      NotImplementedError: the mesh is not of TPUs; TPU DMAs cannot move arrays of this dtype or shape.
    """
    _check_refs("ppermute_start_stateful", x_ref, y_ref)
    pair.check_movable("ppermute_stateful", jax.typeof(x_ref[...]))
    shift %= lax.axis_size(axis_name)

    def body(x: Any, y: Any, send_sem: Any, recv_sem: Any) -> None:
        pallas.enter(axis_name, shift, collective_id)
        pallas.send(x, y, send_sem, recv_sem, axis_name, shift)

    sems, (x_ref[...], y_ref[...]), _ = pair.launch(
        "ppermute_stateful_start",
        body,
        (x_ref[...], y_ref[...]),
        semaphores=2,
        collective_id=collective_id,
        remote=True,
    )
    return sems[0], sems[1]


def ppermute_done_stateful(send_sem: Any, recv_sem: Any, x_ref: Any, y_ref: Any) -> None:
    """Waits until x_ref is sent and y_ref has arrived.

    Raises:
      ValueError: the two are one Ref, are views, or differ in shape or dtype.
    """
    _check_refs("ppermute_done_stateful", x_ref, y_ref)
    x_ref[...], y_ref[...] = pair.land(
        "ppermute_stateful_done",
        pallas.wait_sent_and_received,
        (x_ref[...], y_ref[...]),
        (send_sem, recv_sem),
        returned=(0, 1),
    )
    _keep()


def new_slots(x: jax.Array) -> Any:
    """Makes a Ref of shape [2, *x.shape] with `x` in slot 0: the two buffers of a ring, in one."""
    both = _empty_like(x, (2, *x.shape))
    return jax.new_ref(lax.dynamic_update_slice_in_dim(both, x[None], 0, axis=0))


def start_slots(
    slots_ref: Any, slot: Any, axis_name: str, *, shift: int, collective_id: int | None = None
) -> Semaphores:
    """Begins sending `slots_ref[slot]` to `slots_ref[1 - slot]` of the device `shift` places onward on `axis_name`.

    Args:
      slots_ref: of shape [2, ...], from `new_slots`. Until the done its slot `slot` may be read, and nothing written.
      slot: 0 or 1, int32; of a loop, the parity of the hop.
      axis_name: the mesh axis.
      shift: device i sends to device (i + shift) % R.
      collective_id: of the entry barrier; see `flaxasync.transport.pallas.start`.

    Returns:
      The send and the receive semaphore.

    Raises:
      ValueError: slots_ref is not a whole Ref with two slots.
      NotImplementedError: TPU DMAs cannot move arrays of this dtype or shape.
    """
    _check_slots("start_slots", slots_ref)
    pair.check_movable("ppermute_stateful", jax.typeof(slots_ref[0]))
    shift %= lax.axis_size(axis_name)

    def body(slot_ref: Any, slots: Any, send_sem: Any, recv_sem: Any) -> None:
        pallas.enter(axis_name, shift, collective_id)
        here = slot_ref[0]
        pallas.send(slots.at[here], slots.at[1 - here], send_sem, recv_sem, axis_name, shift)

    sems, (slots_ref[...],), _ = pair.launch(
        "ppermute_slots_start",
        body,
        (slots_ref[...],),
        scalars=(slot,),
        semaphores=2,
        collective_id=collective_id,
        remote=True,
    )
    return sems[0], sems[1]


def done_slots(send_sem: Any, recv_sem: Any, slots_ref: Any, slot: Any) -> None:
    """Waits until slot `slot` is sent and slot `1 - slot` has arrived. Arguments as `start_slots`."""
    _check_slots("done_slots", slots_ref)

    def body(slot_ref: Any, slots: Any, send_sem: Any, recv_sem: Any) -> None:
        here = slot_ref[0]
        pallas.wait_sent_and_received(slots.at[here], slots.at[1 - here], send_sem, recv_sem)

    (slots_ref[...],) = pair.land(
        "ppermute_slots_done", body, (slots_ref[...],), (send_sem, recv_sem), returned=(0,), scalars=(slot,)
    )
    _keep()


def tie_refs(*refs: Any, values: Any = None) -> Any:
    """Orders everything that was done to `refs`, and what `values` need, before everything that follows on them.

    The ordering barrier for Refs: operations on one Ref keep their order by themselves, operations on two do not.

    Args:
      *refs: whole Refs.
      values: a pytree of arrays and numbers that belong into the same order.

    Returns:
      The values, which are there once all that came before is done.
    """
    contents, values = schedule.tie([ref[...] for ref in refs], values)
    for ref, content in zip(refs, contents, strict=True):
        ref[...] = content
    return values


def open(block: Any, axis_name: str, *, shift: int) -> "Refs":
    """The channel of one block of a ring, for `flaxasync.ring.staggered_loop`: two Refs for every array of it."""
    arrays, structure = jax.tree.flatten(block)
    return Refs(tuple((jax.new_ref(x), jax.new_ref(_empty_like(x))) for x in arrays), structure, axis_name, shift)


def check_unroll(unroll: int) -> None:
    """Raises ValueError for a loop whose body does not end with every Ref in the role that it began with."""
    if unroll % 2:
        raise ValueError(
            f"a loop of Refs needs an even unroll: got unroll={unroll}. Source and destination are two Refs that "
            "change roles every turn. Leave unroll out, or use backend='xla'"
        )


@dataclasses.dataclass(frozen=True)
class Refs:
    """A block of a ring in pairs of Refs, which change roles each turn. A loop carries nothing of it but semaphores."""

    pairs: tuple[tuple[Any, Any], ...]
    structure: Any
    axis_name: str
    shift: int

    def start(self) -> list[Semaphores]:
        return self._start(0)

    def read(self, state: list[Semaphores], turn: int) -> Any:
        return jax.tree.unflatten(self.structure, [refs[turn % 2][...] for refs in self.pairs])

    def tie(self, state: list[Semaphores], values: Any) -> tuple[list[Semaphores], Any]:
        return state, tie_refs(*(ref for refs in self.pairs for ref in refs), values=values)

    def hop(self, state: list[Semaphores], update: Callable[[Any], Any] | None, turn: int) -> list[Semaphores]:
        self._done(state, turn)
        if update is not None:
            for refs, x in zip(self.pairs, jax.tree.leaves(update(self.read(state, turn + 1))), strict=True):
                refs[(turn + 1) % 2][...] = x
        return self._start(turn + 1)

    def finish(self, state: list[Semaphores], update: Callable[[Any], Any] | None, turn: int) -> Any:
        self._done(state, turn)
        block = self.read(state, turn + 1)
        return block if update is None else update(block)

    def _start(self, turn: int) -> list[Semaphores]:
        ends = [(refs[turn % 2], refs[(turn + 1) % 2]) for refs in self.pairs]
        return [ppermute_start_stateful(*refs, self.axis_name, self.shift) for refs in ends]

    def _done(self, state: list[Semaphores], turn: int) -> None:
        for sems, refs in zip(state, self.pairs, strict=True):
            ppermute_done_stateful(*sems, refs[turn % 2], refs[(turn + 1) % 2])


def _empty_like(x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Memory of x's dtype that varies over the same mesh axes, with nothing in it."""
    empty, varying = lax.empty(x.shape if shape is None else shape, x.dtype), tuple(sorted(jax.typeof(x).mat.varying))
    return lax.pcast(empty, varying, to="varying") if varying else empty


def _check_refs(caller: str, x_ref: Any, y_ref: Any) -> None:
    for name, ref in (("x_ref", x_ref), ("y_ref", y_ref)):
        if not _is_whole_ref(ref):
            raise ValueError(
                f"{caller} needs {name} to be a whole Ref: got {type(ref).__name__}; make one with jax.new_ref, and "
                "for two buffers in one use new_slots and start_slots"
            )
    if x_ref is y_ref:
        raise ValueError(f"{caller} was given one Ref as x_ref and y_ref: what arrives would overwrite what is sent")
    if (x_ref.shape, x_ref.dtype) != (y_ref.shape, y_ref.dtype):
        raise ValueError(
            f"{caller} needs two Refs of one type: got x_ref {x_ref.dtype}{list(x_ref.shape)} and y_ref "
            f"{y_ref.dtype}{list(y_ref.shape)}"
        )


def _check_slots(caller: str, slots_ref: Any) -> None:
    if not _is_whole_ref(slots_ref) or slots_ref.ndim < 2 or slots_ref.shape[0] != 2:
        got = list(slots_ref.shape) if _is_whole_ref(slots_ref) else type(slots_ref).__name__
        raise ValueError(f"{caller} needs a whole Ref of shape [2, ...], from new_slots: got {got}")


def _is_whole_ref(ref: Any) -> bool:
    return isinstance(ref, jax.core.Tracer | jax.Ref) and hasattr(jax.typeof(ref), "inner_aval")


# An operation that does nothing and may not be removed: it keeps the loop that it stands in. A `pallas_call` with side
# effects is kept by itself, but JAX drops a whole loop when neither a result nor an effect of it is needed.
_keep_p = Primitive("flaxasync_keep")
_keep_p.multiple_results = True
_keep_p.def_impl(list)
mlir.register_lowering(_keep_p, lambda context: [])


@_keep_p.def_effectful_abstract_eval
def _keep_effects() -> tuple[list, Any]:
    return [], _effect_of_a_call()


@functools.cache
def _effect_of_a_call() -> Any:
    """The effects of a foreign call with side effects, which JAX keeps in loops, branches and gradients."""
    call = jax.ffi.ffi_call("flaxasync_keep", (), has_side_effect=True)
    return jax.make_jaxpr(lambda: call())().effects


def _keep() -> None:
    _keep_p.bind()
