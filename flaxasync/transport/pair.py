"""A start/done pair built from two kernel bodies: one begins a transfer and returns, the other
waits for it.

The two are `pallas_call`s on one TPU core, and whatever XLA schedules between them runs while the
transfer is under way. XLA sees arrays; it does not know about the transfer that reads one of them
and writes another. The form of the two calls, which is the same for every pair, keeps XLA from
touching their memory:

* The source is aliased through the start and is an operand of the done, so its memory stays alive
  and unchanged until the done.
* The destination is created by the start and aliased through the done, so nothing else uses it
  before the done.
* Both are in HBM, as `pltpu.HBM` outputs. XLA would put `pl.ANY` outputs into VMEM if they fit.
* The calls have side effects, so they are not merged. They are also not removed, except with a
  whole loop whose result nothing uses.

Two rules remain for the caller. A loop that carries a `Future` needs two turns in its body
(`check_unroll` of `flaxasync.transport.pallas`), and `Future.buffer` must not be read.
docs/async.md shows how each case is compiled.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax import custom_batching
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.mesh import UnsupportedError

type Ref = Any  # a Ref of `jax.new_ref`, or one that a kernel is given
type Semaphore = Any  # a DMA semaphore: outside kernels an int32 scalar
type Scalar = Any  # an int or an int32 scalar
type Arrays = Any  # an array, or a pytree of arrays

_SEMAPHORE, _HBM = (pl.BlockSpec(memory_space=space) for space in (pltpu.SEMAPHORE, pltpu.HBM))
_MOVED = "8, 16 and 32 bit integers, bfloat16, float32 and the floats below 16 bits"


class Aval(NamedTuple):
    """What a future remembers about an array of its x. The axes are the mesh axes over which x
    varies.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    varying: frozenset[str]

    @classmethod
    def of(cls, x: jax.Array) -> "Aval":
        return cls(x.shape, jnp.dtype(x.dtype), frozenset(jax.typeof(x).mat.varying))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["semaphores", "buffer"],
    meta_fields=["pair", "avals"],
)
@dataclasses.dataclass(eq=False)
class Future:
    """A transfer under way. It is a pytree of arrays, so it passes through `fori_loop`, `scan` and
    `cond`.
    """

    semaphores: tuple[Semaphore, ...]  # they count the bytes that the transfer has read and written
    # the memory that is being written; it must not be read: `done` returns it with the result
    buffer: Arrays
    pair: "Pair"
    avals: tuple[Aval, ...]  # the types of the arrays of the x that belongs to the future
    # traces that waited for it
    done_in: list[Any] = dataclasses.field(default_factory=list, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A start and a done. Create it once, not in each call, because it is part of the type of its
    futures.

    ```python
    def begin(x_ref, y_ref, sem):
        pltpu.make_async_copy(x_ref.at[0], y_ref, sem).start()

    def wait(x_ref, y_ref, sem):
        pltpu.make_async_copy(x_ref.at[0], y_ref, sem).wait()

    first_row = Pair("first_row", begin, wait, out=lambda x: x[0])

    x, future = first_row.start(x)
    z = x * 2                                       # while the row is on its way
    y = first_row.done(x, future)
    ```

    `start_body(*scalars, x_ref, y_ref, *semaphores)` starts every transfer and waits for none.
    Scalars are refs [1] in SMEM. `done_body(x_ref, y_ref, *semaphores)` waits until x_ref has been
    read and y_ref has been written. A wait takes only the number of bytes from its refs.

    Both x and y may be pytrees of arrays, such as tuples. The bodies then get the refs of all
    arrays of x, in the order of `jax.tree.leaves`, and after those the refs of y.
    """

    name: str  # the two kernels are called name_start and name_done
    start_body: Callable[..., None]
    done_body: Callable[..., None]
    # x -> y, which is traced only for the shapes and dtypes of y
    out: Callable[[Any], Arrays] = lambda x: x
    semaphores: int = 1  # DMA semaphores that the two kernels share
    memory_space: Any = pltpu.HBM  # of y; `pltpu.VMEM` for something that fits and is used next
    # of the barrier that start_body uses, if it uses one without a tag
    collective_id: int | None = None
    remote: bool = False  # whether start_body sends to another device
    # whether the bodies move any x alike, to a y like it; `jax.vmap` moves a batch at once
    elementwise: bool = False
    instead: str = ""  # what the caller can use for arrays that TPU DMAs cannot move

    def start(self, x: Arrays, *scalars: Scalar) -> tuple[Any, Future]:
        """Begins the transfer from x; the scalars are int32, for start_body.

        Returns:
          `(x, future)`: the x to use from here on, and what `done` needs. Code that goes on using
          the x that was passed in makes XLA copy it.

        Raises:
          NotImplementedError: TPU DMAs cannot move arrays of this dtype or shape.
        """
        for leaf in jax.tree.leaves(x):
            check_movable(f"{self.name}_start", leaf, self.instead)
        start = self._start
        count = self.semaphores
        if self.elementwise:
            every = _all_batched(x)  # what is sent, and what arrives; semaphores have no batch
            start = custom_batching.custom_vmap(start)
            start.def_vmap(
                lambda size, batched, x: (self._start(x), (every, every, (False,) * count))
            )
        sent, buffer, semaphores = start(x, *scalars)
        return sent, Future(semaphores, buffer, self, tuple(map(Aval.of, jax.tree.leaves(x))))

    def done(self, x: Arrays, future: Future) -> Any:
        """Waits for the transfer and returns y.

        Raises:
          ValueError: The future belongs to another pair or to an x of another shape or dtype, or it
            was waited for before.
        """
        if not isinstance(future, Future) or future.pair != self:
            if isinstance(future, Future):
                other = future.pair.name
            else:
                other = type(future).__name__
            raise ValueError(
                f"{self.name}_done needs a future of {self.name}_start: got one of {other}"
            )
        check_avals(f"{self.name}_done", x, future.avals)
        _check_first_wait(f"{self.name}_done", future)
        done = self._done
        if self.elementwise:
            done = custom_batching.custom_vmap(done)
            done.def_vmap(
                lambda size, batched, x, *others: (self._done(x, *others), _all_batched(x))
            )
        return done(x, future.buffer, future.semaphores)

    def _start(self, x: Arrays, *scalars: Scalar) -> tuple[Arrays, Arrays, tuple[Semaphore, ...]]:
        arrays, x_structure = jax.tree.flatten(x)
        types, y_structure = jax.tree.flatten(jax.eval_shape(self.out, x))
        sent_bytes = 0
        if self.remote:
            sent_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
        semaphores, arrays, buffers = start_kernel(
            f"{self.name}_start",
            self.start_body,
            arrays,
            made=[self.memory_space.like(type_) for type_ in types],
            scalars=scalars,
            semaphores=self.semaphores,
            collective_id=self.collective_id,
            sent=sent_bytes,
        )
        sent = jax.tree.unflatten(x_structure, arrays)
        return sent, jax.tree.unflatten(y_structure, buffers), tuple(semaphores)

    def _done(self, x: Arrays, buffer: Arrays, semaphores: tuple[Semaphore, ...]) -> Arrays:
        arrays = jax.tree.leaves(x)
        buffers, y_structure = jax.tree.flatten(buffer)
        spaces = (pltpu.HBM,) * len(arrays) + (self.memory_space,) * len(buffers)
        operands = (*arrays, *buffers)
        returned = range(len(arrays), len(spaces))
        name = f"{self.name}_done"
        results = done_kernel(
            name, self.done_body, operands, semaphores, returned=returned, spaces=spaces
        )
        return jax.tree.unflatten(y_structure, results)


def start_kernel(
    name: str,
    body: Callable[..., None],
    arrays: Sequence[jax.Array],
    *,
    made: Sequence[Any] = (),
    scalars: Sequence[Scalar] = (),
    semaphores: int = 1,
    collective_id: int | None = None,
    sent: int = 0,
) -> tuple[list[Semaphore], list[jax.Array], list[jax.Array]]:
    """Calls the start of a pair: `body(*scalars, *arrays, *made, *semaphores)` returns before its
    transfers end.

    The scalars are int32, and the body gets refs of shape [1] in SMEM. Each of the arrays, in HBM,
    is aliased to a result. The kernel creates arrays of the types `made`, such as `pltpu.HBM(shape,
    dtype)`, and so many semaphores. It returns the semaphores, the arrays, and what was created.
    `sent` are the bytes that leave the device.
    """
    scalar_count = len(scalars)
    array_count = len(arrays)
    first_made = semaphores + array_count  # results: semaphores, the arrays, what is made
    made_spaces = tuple(pl.BlockSpec(memory_space=type_.memory_space) for type_ in made)
    results = pl.pallas_call(
        _start_of(body, scalar_count + array_count, first_made, semaphores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalar_count,
            in_specs=[_HBM] * array_count,
            out_specs=(*(_SEMAPHORE,) * semaphores, *(_HBM,) * array_count, *made_spaces),
        ),
        out_shape=(
            *(pltpu.SemaphoreType.DMA(()),) * semaphores,
            *map(pltpu.HBM.like, arrays),
            *made,
        ),
        input_output_aliases={scalar_count + i: semaphores + i for i in range(array_count)},
        compiler_params=_params(collective_id),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=0, remote_bytes_transferred=sent
        ),
        name=name,
    )(
        *[jnp.reshape(jnp.asarray(scalar, jnp.int32), (1,)) for scalar in scalars],
        *[pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays],
    )
    return (
        list(results[:semaphores]),
        list(results[semaphores:first_made]),
        list(results[first_made:]),
    )


# JAX traces a kernel once for the same types if it is the same function. A step has hundreds of
# starts and dones, of few pairs and shapes.
@functools.lru_cache(maxsize=256)
def _start_of(
    body: Callable[..., None], operands: int, first_made: int, semaphores: int
) -> Callable[..., None]:
    """Returns the kernel of a start, whose refs are the operands, the semaphores, the arrays again,
    and what is made.
    """

    def kernel(*refs: Ref) -> None:
        of_results = refs[operands:]
        body(*refs[:operands], *of_results[first_made:], *of_results[:semaphores])

    return kernel


@functools.lru_cache(maxsize=256)
def _done_of(body: Callable[..., None], operands: int) -> Callable[..., None]:
    """Returns the kernel of a done, whose refs are the operands and what is returned."""

    def kernel(*refs: Ref) -> None:
        body(*refs[:operands])

    return kernel


def done_kernel(
    name: str,
    body: Callable[..., None],
    arrays: Sequence[jax.Array],
    semaphores: Sequence[Semaphore],
    *,
    returned: Sequence[int],
    spaces: Sequence[Any] | None = None,
) -> list[jax.Array]:
    """Calls the done of a pair: `body(*arrays, *semaphores)` waits for what `start_kernel` started.

    The arrays are those that `start_kernel` returned, the aliased ones first, each in its memory
    space (HBM by default). Those at the positions `returned` are aliased through and returned. The
    others are only kept alive.
    """
    if spaces is None:
        spaces = (pltpu.HBM,) * len(arrays)
    array_specs = [pl.BlockSpec(memory_space=space) for space in spaces]
    placed = [
        pltpu.with_memory_space_constraint(x, space)
        for x, space in zip(arrays, spaces, strict=True)
    ]
    return pl.pallas_call(
        _done_of(body, len(arrays) + len(semaphores)),
        in_specs=[*array_specs, *[_SEMAPHORE] * len(semaphores)],
        out_specs=[pl.BlockSpec(memory_space=spaces[i]) for i in returned],
        out_shape=[spaces[i].like(arrays[i]) for i in returned],
        input_output_aliases={i: output for output, i in enumerate(returned)},
        compiler_params=_params(None),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
        name=name,
    )(*placed, *semaphores)


def check_movable(caller: str, x: Any, instead: str) -> None:
    """Raises NotImplementedError for an array that TPU DMAs cannot move; `instead` is what the
    caller can use for it, if there is something.
    """
    dtype = jnp.dtype(x.dtype)
    advice = ""
    if instead:
        advice = f", or use {instead}"
    kinds = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if not kinds or dtype.itemsize > 4 or dtype == jnp.float16:
        raise UnsupportedError(
            f"{caller}: TPU DMAs move {_MOVED}: got {dtype}; cast or bitcast it before the "
            f"call{advice}"
        )
    if x.ndim == 0 or x.size == 0:
        raise UnsupportedError(
            f"{caller}: TPU DMAs move arrays of one dimension or more that are not empty: got "
            f"{dtype}{list(x.shape)}; reshape it{advice}"
        )


def pair_of(future: Any, name: str) -> Pair:
    """Returns the pair of a future that a start of this name returned.

    Raises:
      ValueError: It is something else.
    """
    got = type(future).__name__
    if isinstance(future, Future):
        if future.pair.name == name:
            return future.pair
        got = f"one of {future.pair.name}"
    raise ValueError(f"{name}_done needs the future that {name}_start returned: got {got}")


def check_avals(caller: str, x: Arrays, needed: Sequence[Aval]) -> None:
    """Raises ValueError if `x` is not what a future belongs to."""
    found = [Aval.of(leaf) for leaf in jax.tree.leaves(x)]
    if [aval[:2] for aval in found] != [aval[:2] for aval in needed]:
        raise ValueError(
            f"{caller} was given {_types(found)} with the future of {_types(needed)}; pass the x "
            "that the start returned beside the future"
        )
    for has, needs in zip(found, needed, strict=True):
        if has.varying != needs.varying:
            raise ValueError(
                f"{caller} was given an x that varies over {sorted(has.varying)} with the future "
                f"of one that varies over {sorted(needs.varying)}: a future of another axis; pass "
                "the x that the start returned beside it"
            )


def _types(avals: Sequence[Aval]) -> str:
    return ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in avals)


def _all_batched(x: Arrays) -> Arrays:
    """Returns what `custom_vmap` is told of results of which each has the batch as its first
    dimension.
    """
    return jax.tree.map(lambda _: True, x)


def _check_first_wait(caller: str, future: Future) -> None:
    """Raises ValueError if `future` was waited for in this trace before."""
    # Two branches of a cond may each wait for it, so only a done in the same trace counts as a
    # second one.
    trace = jax.extend.core.get_opaque_trace_state(convention="flaxasync")
    if trace in future.done_in:
        raise ValueError(
            f"{caller} was given a future that was waited for before: its semaphores are spent, "
            "and a second wait never ends; use what the first done returned"
        )
    future.done_in.append(trace)


def _params(collective_id: int | None) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        collective_id=collective_id, has_side_effects=pltpu.SideEffectType.SIDE_EFFECTING
    )
