"""The public permute: `ppermute_start`, `ppermute_done`, and `ppermute`, which does both and is differentiable."""

import dataclasses
import functools

import jax

from flaxasync import mesh
from flaxasync.mesh import UnsupportedError, cast_to_varying, mapped_axis_size
from flaxasync.ring import Transport
from flaxasync.transport import pair, xla
from flaxasync.transport.pallas import PallasTransport
from flaxasync.transport.stateful import StatefulTransport
from flaxasync.transport.values import ValueTransport
from flaxasync.transport.xla import XlaTransport

TRANSPORTS: dict[str, Transport] = {"xla": XlaTransport(), "pallas": PallasTransport(), "stateful": StatefulTransport()}


def get(backend: str, caller: str = "this") -> Transport:
    """Returns the transport of a backend's name.

    Raises:
      NotImplementedError: No transport has this name, or its kernels cannot run on the devices of the enclosing mesh.
    """
    if backend not in TRANSPORTS:
        raise UnsupportedError(
            f"no transport for backend={backend!r}: it must be one of {sorted(TRANSPORTS)}; 'xla' runs on every device"
        )
    if backend != "xla":
        mesh.check_tpu(f"{caller} with backend={backend!r}", "backend='xla', which runs on every device")
    return TRANSPORTS[backend]


def ppermute_start(
    x: jax.Array, axis_name: str, shift: int = 1, backend: str | None = None, *, collective_id: int | None = None
) -> tuple[jax.Array, xla.Future | pair.Future]:
    """Begins sending `x` to the device `shift` positions onward on `axis_name`.

    Call it inside `jax.shard_map`. Compute between the two calls that does not need the result of `ppermute_done` can
    hide the transfer; `flaxasync.while_travelling` keeps such compute there.

    Args:
      x: This device's block, of any shape.
      axis_name: A mesh axis of R devices that the enclosing `shard_map` maps.
      shift: Device i sends to device (i + shift) % R.
      backend: "xla" (`lax.ppermute` of this x: any device, differentiable; XLA chooses when the transfer begins and
        ends, and runs beside it what neither feeds x nor needs the done) or "pallas" (TPU: the transfer begins here and
        ends at the done; it has no gradient, but `ppermute` has one). None means "xla", on TPUs too, because XLA keeps
        its own permutes safe.
      collective_id: The id of the entry barrier of "pallas"; by default one that no other kernel of the program has.

    Returns:
      `(x, future)`. Use the returned `x` from here on, and give both to `ppermute_done`, once. A loop that carries them
      needs `unroll=2` with "pallas". With "xla" it holds the block twice, which costs a copy in every turn.

    Raises:
      ValueError: `axis_name` is not an axis that an enclosing `shard_map` maps.
      NotImplementedError: `backend` cannot run here, or cannot move such an array.
    """
    size = mapped_axis_size("ppermute_start", axis_name)
    transport = get(backend or "xla", "ppermute_start")
    if not isinstance(transport, ValueTransport):
        raise UnsupportedError(
            f"ppermute_start with backend={backend!r} has no Refs to work on; use ppermute_start_stateful, or "
            "backend='pallas'"
        )
    if backend == "pallas":
        transport = PallasTransport(collective_id)
    x, future = transport.start(cast_to_varying(x, {axis_name}), axis_name, shift=shift % size)
    return x, dataclasses.replace(future, block=x) if isinstance(future, xla.Future) else future


def ppermute_done(x: jax.Array, future: xla.Future | pair.Future) -> jax.Array:
    """Waits for a transfer and returns the block of the device `shift` positions before this one.

    Args:
      x: The block that `ppermute_start` returned.
      future: The future that it returned beside the block.

    Returns:
      What arrived, in the shape and dtype of `x`.

    Raises:
      ValueError: `future` is not a future, or belongs to a block of another shape, dtype or axis; or, with "pallas",
        it was waited for before.
    """
    if not isinstance(future, xla.Future | pair.Future):
        raise ValueError(f"ppermute_done needs the future that ppermute_start returned: got {type(future).__name__}")
    pair.check_aval("ppermute_done", x, future)
    return future.pair.done(x, future) if isinstance(future, pair.Future) else XlaTransport().done(x, future)


def ppermute(
    x: jax.Array, axis_name: str, shift: int = 1, backend: str | None = None, *, collective_id: int | None = None
) -> jax.Array:
    """Returns the block of the device `shift` positions before this one: a start, then a done.

    It is differentiable on every backend: the cotangent travels `shift` positions back. Arguments and errors are those
    of `ppermute_start`.
    """
    if backend != "pallas":
        return ppermute_done(*ppermute_start(x, axis_name, shift, backend))
    mapped_axis_size("ppermute", axis_name)
    get(backend, "ppermute")
    return _ppermute_pallas(axis_name, shift, collective_id, cast_to_varying(x, {axis_name}))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ppermute_pallas(axis_name: str, shift: int, collective_id: int | None, x: jax.Array) -> jax.Array:
    transport = PallasTransport(collective_id)
    return transport.done(*transport.start(x, axis_name, shift=shift))


def _ppermute_pallas_fwd(axis_name: str, shift: int, collective_id: int | None, x: jax.Array) -> tuple[jax.Array, None]:
    return _ppermute_pallas(axis_name, shift, collective_id, x), None


def _ppermute_pallas_bwd(
    axis_name: str, shift: int, collective_id: int | None, saved: None, dy: jax.Array
) -> tuple[jax.Array]:
    # The opposite shift has other neighbours, so it cannot use the barrier of the forward pass, which collective_id
    # names.
    return (_ppermute_pallas(axis_name, -shift, None, dy),)


_ppermute_pallas.defvjp(_ppermute_pallas_fwd, _ppermute_pallas_bwd)
