"""The permute between the two slots of one Ref: the stateful loop with one hop in its body. For
TPUs only.

```python
slots = jax.new_ref(jnp.stack([x, jnp.zeros_like(x)]))
sems = ppermute_start_slots(slots, 0, "model")


def turn(hop, carry):
    sems, seen = carry
    hop, seen = tie_refs(slots, values=(hop, seen))               # after the start
    seen = tie_refs(slots, values=seen + slots[hop % 2])          # before the done
    ppermute_done_slots(*sems, slots)
    return ppermute_start_slots(slots, (hop + 1) % 2, "model"), seen


sems, seen = jax.lax.fori_loop(0, hops - 1, turn, (sems, jnp.zeros_like(x)))
ppermute_done_slots(*sems, slots)
y = slots[hops % 2]
```

The slot is a scalar that the start kernel gets before it runs (scalar prefetch), so it may be
traced. Both slots are one buffer to XLA, and a loop that carries it has no roles to swap: it needs
no `unroll`. What the loop reads of the Ref is tied, as above, so that it stays between the start
and the done.
"""

import jax

from flaxasync import mesh
from flaxasync.kernels.engine.slots import wait
from flaxasync.transport import pair, pallas, stateful
from flaxasync.transport.pair import Ref, Scalar, Semaphore
from flaxasync.transport.stateful import Semaphores


def ppermute_start_slots(
    slots_ref: Ref,
    slot: Scalar,
    axis_name: str,
    shift: int = 1,
    *,
    collective_id: int | None = None,
) -> Semaphores:
    """Begins sending one slot of `slots_ref` to the other slot of the device `shift` positions
    onward. TPU only.

    Args:
      slots_ref: A Ref [2, ...] of `jax.new_ref`. Until the done, slot `slot` may be read, and
        nothing may be written.
      slot: 0 or 1, the slot that is sent; the other one is written. It may be traced: in a loop,
        the parity of the hop.
      axis_name: A mesh axis of R devices that the enclosing `shard_map` maps.
      shift: Device i sends to device (i + shift) % R.
      collective_id: The id of the entry barrier; by default one that no other kernel of the program
        has.

    Returns:
      The semaphores of the two ends, for `ppermute_done_slots(*sems, slots_ref)`.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; slots_ref is not a whole Ref with two slots; slot
        is neither 0 nor 1.
      NotImplementedError: The mesh is not made of TPUs, or TPU DMAs cannot move such an array.
    """
    size = mesh.mapped_axis_size("ppermute_start_slots", axis_name)
    mesh.check_tpu(
        "ppermute_start_slots", "ppermute_start with backend='xla', which runs on every device"
    )
    _check_slots("ppermute_start_slots", slots_ref)
    if isinstance(slot, int) and slot not in (0, 1):
        raise ValueError(
            f"ppermute_start_slots needs slot to be 0 or 1: got {slot}; give it the parity of the "
            "hop"
        )
    slot_type = jax.ShapeDtypeStruct(slots_ref.shape[1:], slots_ref.dtype)
    pair.check_movable("ppermute_start_slots", slot_type, "ppermute_start with backend='xla'")

    def body(slot_ref: Ref, slots: Ref, send_sem: Semaphore, recv_sem: Semaphore) -> None:
        pallas.enter(axis_name, shift % size, collective_id)
        sent = slot_ref[0]
        pallas.send(slots.at[sent], slots.at[1 - sent], send_sem, recv_sem, axis_name, shift % size)

    semaphores, (slots_ref[...],), _ = pair.start_kernel(
        "ppermute_slots_start",
        body,
        (slots_ref[...],),
        scalars=(slot,),
        semaphores=2,
        collective_id=collective_id,
        sent=slots_ref.size // 2 * slots_ref.dtype.itemsize,
    )
    return semaphores[0], semaphores[1]


def ppermute_done_slots(send_sem: Semaphore, recv_sem: Semaphore, slots_ref: Ref) -> None:
    """Waits until one slot of `slots_ref` has been sent and the other one has arrived. Then both
    may be used again.

    Args:
      send_sem, recv_sem: The semaphores that `ppermute_start_slots` returned.
      slots_ref: The Ref that it was given.

    Raises:
      ValueError: slots_ref is not a whole Ref with two slots.
    """
    _check_slots("ppermute_done_slots", slots_ref)

    def body(slots: Ref, send_sem: Semaphore, recv_sem: Semaphore) -> None:
        # A wait takes only the number of bytes from its refs, and both slots have as many.
        with jax.named_scope("wait"):
            wait(slots.at[0], send_sem)
            wait(slots.at[0], recv_sem)

    (slots_ref[...],) = pair.done_kernel(
        "ppermute_slots_done", body, (slots_ref[...],), (send_sem, recv_sem), returned=(0,)
    )
    stateful.keep()


def _check_slots(caller: str, slots_ref: Ref) -> None:
    if not stateful.is_whole_ref(slots_ref):
        raise ValueError(
            f"{caller} needs slots_ref to be a whole Ref [2, ...]: got {type(slots_ref).__name__}; "
            "make one with jax.new_ref(jnp.stack([x, jnp.zeros_like(x)]))"
        )
    if slots_ref.ndim < 2 or slots_ref.shape[0] != 2:
        raise ValueError(
            f"{caller} needs slots_ref to have two slots of one dimension or more, [2, ...]: got "
            f"{slots_ref.dtype}{list(slots_ref.shape)}; make it with jax.new_ref(jnp.stack([x, "
            "jnp.zeros_like(x)]))"
        )
