"""The public permute: `ppermute_start`, `ppermute_done`, and `ppermute`, which does both and is
differentiable.
"""

import dataclasses
import functools

import jax
from jax import lax

from flaxasync import mesh, ring
from flaxasync.mesh import UnsupportedError, cast_to_varying, mapped_axis_size
from flaxasync.transport import pallas
from flaxasync.transport.pair import Aval, Future, check_avals, pair_of
from flaxasync.transport.stateful import StatefulTransport
from flaxasync.transport.xla import XlaTransport

TRANSPORTS: dict[str, ring.Transport] = {
    "xla": XlaTransport(),
    "pallas": pallas.PallasTransport(),
    "stateful": StatefulTransport(),
}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["block"], meta_fields=["axis_name", "shift"]
)
@dataclasses.dataclass(frozen=True)
class PendingPermute:
    """What `ppermute_start` returns for backend "xla": the done issues the permute, and XLA begins
    it when it can.

    XLA runs whatever the operand of its permute depends on before the transfer. `while_travelling`
    ties the x of the pair to the compute, so the done sends this block, and not that x.
    """

    block: jax.Array  # what is sent: the block that `ppermute_start` was given
    axis_name: str
    shift: int

    @property
    def aval(self) -> Aval:
        return Aval.of(self.block)


def ppermute_start(
    x: jax.Array,
    axis_name: str,
    shift: int = 1,
    backend: str | None = None,
    *,
    collective_id: int | None = None,
) -> tuple[jax.Array, PendingPermute | Future]:
    """Begins sending `x` to the device `shift` positions onward on `axis_name`.

    Call it inside `jax.shard_map`. Compute between the two calls that does not need the result of
    `ppermute_done` can hide the transfer; `flaxasync.while_travelling` keeps such compute there.

    Args:
      x: This device's block, of any shape.
      axis_name: A mesh axis of R devices that the enclosing `shard_map` maps.
      shift: Device i sends to device (i + shift) % R.
      backend: "xla" (`lax.ppermute` of this x: any device, differentiable; XLA chooses when the
        transfer begins and ends, and runs beside it what neither feeds x nor needs the done) or
        "pallas" (TPU: the transfer begins here and ends at the done; it has no gradient, but
        `ppermute` has one). None means "xla", on TPUs too, because XLA keeps its own permutes safe.
      collective_id: The id of the entry barrier of "pallas"; by default one that no other kernel of
        the program has.

    Returns:
      `(x, future)`. Use the returned `x` from here on, and give both to `ppermute_done`, once. A
      loop that carries them needs `unroll=2` with "pallas". With "xla" it holds the block twice,
      which costs a copy in every turn.

    Raises:
      ValueError: `axis_name` is not an axis that an enclosing `shard_map` maps.
      NotImplementedError: `backend` cannot run here, or cannot move such an array.
    """
    size = mapped_axis_size("ppermute_start", axis_name)
    if backend is not None and backend not in TRANSPORTS:
        raise UnsupportedError(
            f"no transport for backend={backend!r}: it must be one of {sorted(TRANSPORTS)}; 'xla' "
            "runs on every device"
        )
    if backend in ("pallas", "stateful"):
        mesh.check_tpu(
            f"ppermute_start with backend={backend!r}", "backend='xla', which runs on every device"
        )
    if backend == "stateful":
        raise UnsupportedError(
            "ppermute_start with backend='stateful' has no Refs to work on; use "
            "ppermute_start_stateful, or backend='pallas'"
        )
    x = cast_to_varying(x, {axis_name})
    if backend == "pallas":
        return pallas.permute(axis_name, shift % size, collective_id).start(x)
    return x, PendingPermute(x, axis_name, shift % size)


def ppermute_done(x: jax.Array, future: PendingPermute | Future) -> jax.Array:
    """Waits for a transfer and returns the block of the device `shift` positions before this one.

    Args:
      x, future: The block that `ppermute_start` returned, and the future beside it.

    Raises:
      ValueError: `future` is of no permute, or belongs to a block of another shape, dtype or axis;
        or, with "pallas", it was waited for before.
    """
    if not isinstance(future, PendingPermute):
        return pair_of(future, "ppermute").done(x, future)
    check_avals("ppermute_done", x, [future.aval])
    permutation = ring.permutation(lax.axis_size(future.axis_name), future.shift)
    return lax.ppermute(future.block, future.axis_name, permutation)


def ppermute(
    x: jax.Array,
    axis_name: str,
    shift: int = 1,
    backend: str | None = None,
    *,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns the block of the device `shift` positions before this one: a start, then a done.

    It is differentiable on every backend: the cotangent travels `shift` positions back. Arguments
    and errors are those of `ppermute_start`.
    """
    if backend != "pallas":
        return ppermute_done(*ppermute_start(x, axis_name, shift, backend))
    mapped_axis_size("ppermute", axis_name)
    return _ppermute_pallas(axis_name, shift, collective_id, cast_to_varying(x, {axis_name}))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ppermute_pallas(
    axis_name: str, shift: int, collective_id: int | None, x: jax.Array
) -> jax.Array:
    return ppermute_done(
        *ppermute_start(x, axis_name, shift, "pallas", collective_id=collective_id)
    )


def _ppermute_pallas_fwd(
    axis_name: str, shift: int, collective_id: int | None, x: jax.Array
) -> tuple[jax.Array, None]:
    return _ppermute_pallas(axis_name, shift, collective_id, x), None


def _ppermute_pallas_bwd(
    axis_name: str, shift: int, collective_id: int | None, saved: None, dy: jax.Array
) -> tuple[jax.Array]:
    # The opposite shift has other neighbours, so it cannot use the barrier that collective_id
    # names.
    return (_ppermute_pallas(axis_name, -shift, None, dy),)


_ppermute_pallas.defvjp(_ppermute_pallas_fwd, _ppermute_pallas_bwd)
