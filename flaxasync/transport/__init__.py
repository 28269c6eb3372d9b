"""Moving one block to a neighbour: start it, use the time, wait for it.

The pair is public (`flaxasync.ppermute_start`, `flaxasync.ppermute_done`), and the same pair, as a
`flaxasync.ring.Transport`, carries the ring of every collective matmul. Files: `xla` (`lax.ppermute`), `pallas` (value
futures), `stateful` (Refs), all three transports; `pair` (a start and a done from two kernel bodies), `local` (copies
within a device), `schedule` (keeping compute between the two).
"""

import functools
from types import ModuleType
from typing import Any

import jax

from flaxasync import mesh
from flaxasync.mesh import cast_to_varying, mapped_axis_size
from flaxasync.transport import pair, pallas, stateful, xla
from flaxasync.transport.local import copy_done as copy_done
from flaxasync.transport.local import copy_start as copy_start
from flaxasync.transport.local import slice_done as slice_done
from flaxasync.transport.local import slice_start as slice_start
from flaxasync.transport.pair import Future as Future
from flaxasync.transport.pair import Pair as Pair
from flaxasync.transport.schedule import tie as tie
from flaxasync.transport.schedule import while_travelling as while_travelling
from flaxasync.transport.stateful import tie_refs as tie_refs

TRANSPORTS: dict[str, ModuleType] = {"xla": xla, "pallas": pallas, "stateful": stateful}


def get(backend: str, caller: str = "this") -> Any:
    """The transport of a backend's name.

    Raises:
      NotImplementedError: no transport has this name, or its kernels cannot run on the devices of the enclosing mesh.
    """
    if backend not in TRANSPORTS:
        raise NotImplementedError(
            f"no transport for backend={backend!r}: it must be one of {sorted(TRANSPORTS)}; 'xla' runs on every device"
        )
    if backend != "xla":
        mesh.check_tpu(f"{caller} with backend={backend!r}", "backend='xla', which runs on every device")
    return TRANSPORTS[backend]


def ppermute_start(
    x: jax.Array, axis_name: str, shift: int = 1, backend: str | None = None, *, collective_id: int | None = None
) -> tuple[jax.Array, Any]:
    """Begins sending `x` to the device `shift` places onward on `axis_name`.

    Inside `jax.shard_map`. Compute that stands between the two calls and does not need `ppermute_done`'s result is what
    the transfer can hide behind; `flaxasync.while_travelling` keeps it there.

    Args:
      x: this device's block, of any shape.
      axis_name: a mesh axis of R devices that the enclosing `shard_map` maps.
      shift: device i sends to device (i + shift) % R.
      backend: "xla" (`lax.ppermute`: any device, differentiable, scheduled by XLA) or "pallas" (TPU: the transfer
        begins here and ends at the done; no gradient, which `ppermute` has). None is "xla", on TPU too: it cannot be
        used wrongly.
      collective_id: of the entry barrier of "pallas"; by default one that no other kernel of the program has.

    Returns:
      `(x, future)`. Use the returned `x` from here on, and give both to `ppermute_done`, once. A loop that carries them
      needs `unroll=2` with "pallas".

    Raises:
      ValueError: `axis_name` is not an axis that an enclosing `shard_map` maps.
      NotImplementedError: `backend` cannot run here, or cannot move such an array.
    """
    size = mapped_axis_size("ppermute_start", axis_name)
    backend = backend or "xla"
    transport = get(backend, "ppermute_start")
    x = cast_to_varying(x, {axis_name})
    if backend == "stateful":
        raise NotImplementedError(
            "ppermute_start with backend='stateful' has no Refs to work on; use ppermute_start_stateful, or "
            "backend='pallas'"
        )
    if backend == "pallas":
        return pallas.start(x, axis_name, shift=shift % size, collective_id=collective_id)
    return transport.start(x, axis_name, shift=shift % size)


def ppermute_done(x: jax.Array, future: Any) -> jax.Array:
    """Waits for a transfer: returns the block of the device `shift` places before this one.

    Args:
      x: the block that `ppermute_start` returned.
      future: the future that it returned beside it.

    Returns:
      What arrived, of the shape and dtype of `x`.

    Raises:
      ValueError: `future` is none, belongs to a block of another shape, dtype or axis; or, with "pallas", it was waited
        for before.
    """
    if not isinstance(future, xla.Future | pair.Future):
        raise ValueError(f"ppermute_done needs the future that ppermute_start returned: got {type(future).__name__}")
    pair.check_aval("ppermute_done", x, future)
    return (pallas if isinstance(future, pair.Future) else xla).done(x, future)


def ppermute(
    x: jax.Array, axis_name: str, shift: int = 1, backend: str | None = None, *, collective_id: int | None = None
) -> jax.Array:
    """Returns the block of the device `shift` places before this one: start, then done.

    Differentiable on every backend: the cotangent travels `shift` places back. Arguments and errors as
    `ppermute_start`.
    """
    if backend != "pallas":
        return ppermute_done(*ppermute_start(x, axis_name, shift, backend))
    mapped_axis_size("ppermute", axis_name)
    get(backend, "ppermute")
    return _ppermute_pallas(axis_name, shift, collective_id, cast_to_varying(x, {axis_name}))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ppermute_pallas(axis_name: str, shift: int, collective_id: int | None, x: jax.Array) -> jax.Array:
    return pallas.done(*pallas.start(x, axis_name, shift=shift, collective_id=collective_id))


def _ppermute_pallas_fwd(axis_name: str, shift: int, collective_id: int | None, x: jax.Array) -> tuple[jax.Array, None]:
    return _ppermute_pallas(axis_name, shift, collective_id, x), None


def _ppermute_pallas_bwd(
    axis_name: str, shift: int, collective_id: int | None, saved: None, dy: jax.Array
) -> tuple[jax.Array]:
    # Another shift has other neighbours, so the collective_id of the forward pass, whose barrier it is, cannot serve.
    return (_ppermute_pallas(axis_name, -shift, None, dy),)


_ppermute_pallas.defvjp(_ppermute_pallas_fwd, _ppermute_pallas_bwd)


def ppermute_start_stateful(
    x_ref: Any, y_ref: Any, axis_name: str, shift: int = 1, *, collective_id: int | None = None
) -> stateful.Semaphores:
    """Begins sending what `x_ref` holds to `y_ref` of the device `shift` places onward on `axis_name`. TPU only.

    Args:
      x_ref: a Ref of `jax.new_ref`. Until the done it may be read, not written.
      y_ref: another, of the same shape and dtype. Until the done it may be neither read nor written.
      axis_name: a mesh axis of R devices that the enclosing `shard_map` maps.
      shift: device i sends to device (i + shift) % R.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Returns:
      The semaphores of the two ends, for `ppermute_done_stateful(*sems, x_ref, y_ref)`.

    Raises:
      ValueError: no `shard_map` maps `axis_name`; the two are one Ref, are views, or differ in shape or dtype.
      NotImplementedError: the mesh is not of TPUs, or TPU DMAs cannot move such an array.
    """
    mapped_axis_size("ppermute_start_stateful", axis_name)
    mesh.check_tpu("ppermute_start_stateful", "ppermute_start with backend='xla', which runs on every device")
    return stateful.ppermute_start_stateful(x_ref, y_ref, axis_name, shift, collective_id=collective_id)


def ppermute_done_stateful(send_sem: Any, recv_sem: Any, x_ref: Any, y_ref: Any) -> None:
    """Waits until `x_ref` is sent and `y_ref` has arrived. Both are free again.

    Args:
      send_sem: the first of the semaphores that `ppermute_start_stateful` returned.
      recv_sem: the second.
      x_ref: the Refs that it was given.
      y_ref: likewise.

    Raises:
      ValueError: the two are one Ref, are views, or differ in shape or dtype.
    """
    stateful.ppermute_done_stateful(send_sem, recv_sem, x_ref, y_ref)
