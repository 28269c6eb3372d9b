"""Which backend an op should use for given shapes on a given chip: the roofline in words.

A prediction (`flaxasync.ops.roofline`) ranks backends; it does not say how long a run will take.
"""

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flaxasync.hardware import Chip, Gpu, accelerator
from flaxasync.ops import trust
from flaxasync.ops.cost_models import LARGEST_ON_GPUS, MODELS, ON_GPUS
from flaxasync.ops.quantization import quantization_of
from flaxasync.ops.roofline import Cost, Shape


@dataclasses.dataclass(frozen=True)
class Plan:
    """A choice of backend.

    `trusted` is what a call without a backend takes on the chip: the fastest backend of those that
    are plain XLA or were verified on such a chip with the versions that are installed here. Where
    the verification measured this call, with its gradients, the measured times count. See
    `flaxasync.ops.trust`.
    """

    op: str
    backend: str  # the one to use
    reason: str  # why, in one sentence with figures
    costs: Mapping[str, Cost]  # of every backend that can serve the call
    trusted: str
    unverified: tuple[str, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """The predicted seconds of every backend."""
        return {backend: cost.seconds for backend, cost in self.costs.items()}

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend}, because {self.reason}"]
        seconds = self.seconds
        for name in sorted(seconds, key=seconds.__getitem__):
            cost = self.costs[name]
            line = (
                f"  {name:8} {cost.seconds * 1e3:9.3f} ms predicted: compute "
                f"{cost.compute * 1e3:.3f}, exposed {cost.exposed * 1e3:.3f}, {cost.steps} steps; "
                f"holds {cost.held / 2**20:.0f} MiB"
            )
            if cost.kept:
                line += f"; keeps {cost.kept / 2**20:.0f} MiB of gathered x"
            if name in self.unverified:
                line += "; not verified here"
            lines.append(line)
        if self.trusted != self.backend:
            why = f"by times that {trust.COMMAND!r} measured"
            if self.backend in self.unverified:
                why = f"until {self.backend!r} is verified"
            lines.append(f"a call without a backend takes {self.trusted!r} {why} there")
        return "\n".join(lines)


def plan(
    op: str | Callable,
    *shapes: Shape,
    chip: str | Chip | Gpu,
    ring: int | tuple[int, int],
    **options: Any,
) -> Plan:
    """Predicts how long each backend of an op takes, and chooses one.

    ```python
    print(fa.plan(fa.all_gather_matmul, (8, 256, 8192), (8192, 3584), chip="v5e", ring=8))
    ```

    Args:
      op: A function of this package, or its name: "all_gather_matmul", "matmul_reduce_scatter",
        "matmul_all_reduce", "mesh_matmul", "ring_attention" or "expert_mlp", for rows that are
        spread evenly over the experts.
      *shapes: The shapes of its operands on one device, in its order; those of a tuple of w one
        after the other.
      chip: "v5e", "v5e:2x4", or a `flaxasync.hardware.Chip`; for the collective matmuls also a GPU of
        one host, "h100" or a `flaxasync.hardware.Gpu`.
      ring: The number of devices on the axis; for mesh_matmul the numbers on both axes, (x, y).
      **options: Those options of the op that matter for its time, under its names; `itemsize`, the
        bytes of an element (2 by default); `backward`, whether to count the gradient too (True by
        default; the gradient of mesh_matmul is the same for all backends and is never counted);
        `kernels`, whether the Pallas kernels of the matmuls can serve (True by default);
        `gathered_bytes`, the most bytes that all_gather_matmul may keep for its gradient (0 by
        default; `.costs` have what each backend keeps).

    Returns:
      The plan, with `.backend`, `.reason`, and `.seconds` and `.costs` by backend. str() makes a
      table.

    Raises:
      ValueError: There is no such op or chip; the ring has no devices; the op lacks an option; the
        shapes do not fit.
    """
    name = str(getattr(op, "__name__", op))
    if isinstance(chip, Chip | Gpu):
        spec = chip
    else:
        spec = accelerator(chip)
    _check(name, spec, ring, shapes, options)
    quantization = quantization_of(name, options.get("quantization"))
    kinds: Collection[str] = ()
    if quantization is not None:
        options["quantization"] = quantization
        kinds = quantization.kinds
    costs = MODELS[name](spec, ring, *shapes, **options)
    fitting = {backend: cost for backend, cost in costs.items() if cost.held < spec.hbm_bytes}
    candidates = fitting or costs
    # of two that are equally fast the one that the costs have first
    ranked = sorted(candidates, key=lambda backend: candidates[backend].seconds)
    itemsize = options.get("itemsize", 2)
    where = f"{'x'.join(map(str, _sizes(ring)))} {spec.name}"
    if not fitting:
        least = min(costs, key=lambda backend: costs[backend].held)
        reason = f"nothing fits: even {_too_much(costs, least, where)}"
    elif set(_sizes(ring)) == {1}:
        reason = "one device has every row: there is nothing to transfer"
    else:
        reason = _reason(ranked, costs, where)
    kept = costs[ranked[0]].kept
    if kept:
        reason += f"; it keeps the gathered x, {kept / 2**20:.0f} MiB, which spares its second trip"
    intensity = _intensity(name, ring, itemsize, *shapes)
    reason += (
        f"; its products have an arithmetic intensity of {intensity:.0f} flops a byte, where the "
        f"balance of a {spec.name} is {spec.flops / spec.hbm_bandwidth:.0f}"
    )
    kernels = [backend for backend in costs if backend not in trust.PLAIN]
    # several processes wait for each other when they ask
    evidence = trust.known(spec.name) if kernels else trust.Evidence("none")
    unverified = tuple(b for b in kernels if trust.lacking(evidence, name, b, ring, kinds))
    times: Mapping[str, float] = {}
    if options.get("backward", True) and quantization is None:  # as `verify` times calls
        call = trust.call_key(name, ring, shapes, itemsize)
        times = evidence.times.get(call, {})
    expected = _expected(candidates, times)
    allowed = [backend for backend in ranked if backend not in unverified]
    # "none" if all that fit into memory are unverified
    trusted = min(allowed, key=expected.__getitem__, default="none")
    return Plan(name, ranked[0], reason, costs, trusted, unverified)


def _expected(costs: Mapping[str, Cost], times: Mapping[str, float]) -> dict[str, float]:
    """Returns measured seconds, and predicted ones where there are none, scaled by what "none" was
    measured to take.

    Nothing that keeps gathered rows was measured.
    """
    scale = 1.0
    if "none" in times and "none" in costs:
        scale = times["none"] / costs["none"].seconds
    expected = {}
    for backend, cost in costs.items():
        expected[backend] = scale * cost.seconds
        if backend in times and not cost.kept:
            expected[backend] = times[backend]
    return expected


def _check(
    op: str,
    chip: Chip | Gpu,
    ring: int | tuple[int, int],
    shapes: tuple[Shape, ...],
    options: Mapping[str, Any],
) -> None:
    """Raises ValueError for a call of `plan` about which the op could not be called."""
    if op not in MODELS:
        raise ValueError(f"plan knows {', '.join(sorted(MODELS))}: got {op!r}")
    if not _are_sizes(_sizes(ring)):
        raise ValueError(f"plan needs a ring of 1 device or more: got ring={ring}")
    if (op == "mesh_matmul") != isinstance(ring, tuple):
        raise ValueError(
            f"plan needs ring=(x, y) for mesh_matmul, and one number for other ops: got ring={ring}"
        )
    if isinstance(chip, Gpu):
        unknown = unknown_on_gpus(op, ring, options)
        if unknown is not None:
            raise ValueError(f"plan knows {unknown} on {chip.name}")
    for shape in shapes:
        if not _are_sizes(shape):
            raise ValueError(f"plan needs dimensions of 1 or more: got {list(shape)}")
    try:
        inspect.signature(MODELS[op]).bind(chip, ring, *shapes, **options)
    except TypeError as error:
        raise ValueError(f"plan cannot take these shapes or options for {op}: {error}") from error
    check_gathered_bytes(op, options.get("gathered_bytes", 0))
    if wrong := _misfit(op, _sizes(ring), *shapes):
        raise ValueError(f"plan cannot take these shapes or options for {op}: {wrong}")


def _sizes(ring: int | tuple[int, int]) -> tuple[int, ...]:
    """Returns the numbers of devices on the axes of an op."""
    if isinstance(ring, tuple):
        return ring
    return (ring,)


def _are_sizes(numbers_of: Shape) -> bool:
    return all(isinstance(size, numbers.Integral) and size > 0 for size in numbers_of)


def unknown_on_gpus(op: str, ring: int | tuple[int, int], options: Mapping[str, Any]) -> str | None:
    """Says of which calls on GPUs times are known, and what was asked for, if it is none of them;
    None if it is one.
    """
    if op not in ON_GPUS:
        return f"{', '.join(ON_GPUS)} on GPUs: got {op!r}"
    if options.get("quantization") is not None:
        return f"no times of 8-bit products on GPUs: got {options['quantization']!r}"
    if isinstance(ring, tuple) or ring > LARGEST_ON_GPUS:
        return f"rings of at most {LARGEST_ON_GPUS} GPUs, those of one host: got ring={ring}"
    return None


def check_gathered_bytes(caller: str, gathered_bytes: object) -> None:
    """Raises ValueError, which begins with the caller's name, for a limit of memory that is no
    integer of 0 or more.
    """
    if not isinstance(gathered_bytes, numbers.Integral) or gathered_bytes < 0:
        raise ValueError(
            f"{caller} needs gathered_bytes to be an integer of 0 or more: got {gathered_bytes!r}; "
            "use 2**27 for 128 MiB, or 0 to keep nothing"
        )


def _misfit(op: str, ring: tuple[int, ...], x: Shape, *others: Shape) -> str | None:
    """Says why the op would refuse operands of these shapes; None if it would not."""
    if op == "ring_attention":
        for k in others:
            if not len(x) == len(k) == 4 or (k[0], k[1], k[3]) != (x[0], x[1], x[3]) or x[2] % k[2]:
                return f"q {list(x)} cannot attend to k or v {list(k)}"
        return None
    if op == "expert_mlp":
        ids, _, *kernels = others
        fits = ids[:-1] == x[:-1] and all(len(w) == 3 and x[-1] in w[1:] for w in kernels)
        if fits and kernels:
            return None
        return f"x {list(x)} cannot go to experts {list(map(list, kernels))}"
    x_devices, y_devices = ring if len(ring) == 2 else (1, 1)
    for w in others:
        if len(x) < 2 or len(w) != 2 or x[-1] * y_devices != w[0] * x_devices:
            return f"x {list(x)} cannot be contracted with w {list(w)}"
    if op == "matmul_reduce_scatter" and x[-2] % ring[0]:
        return f"the rows of x {list(x)} cannot be shared out equally to {ring[0]} devices"
    return None


def _intensity(op: str, ring: Any, itemsize: int, x: Shape, *others: Shape) -> float:
    """Returns the flops of a device's forward products for each byte of their operands and results.

    Those of attention are of all scores, without a mask.
    """
    if op == "ring_attention":
        _, rows, heads, features = x
        flops = 4 * rows * heads * ring * rows * features
        moved = 2 * rows * features * (heads + ring * others[0][2])
    elif op == "expert_mlp":
        ids, _, *kernels = others
        weights = sum(map(math.prod, kernels))
        flops = 2 * math.prod(ids) * weights // kernels[0][0]
        moved = 2 * math.prod(x) + weights
    else:
        m = math.prod(x[:-1]) * (ring if op == "all_gather_matmul" else 1)
        k = x[-1]
        n = sum(w[-1] for w in others)
        flops = 2 * m * k * n
        moved = m * k + k * n + m * n
    return flops / (itemsize * moved)


def _reason(ranked: list[str], costs: Mapping[str, Cost], where: str) -> str:
    """Says why the first of those that fit into memory is chosen."""
    first = ranked[0]
    chosen = costs[first]
    for name, cost in costs.items():
        if name not in ranked and (len(ranked) == 1 or cost.seconds < chosen.seconds):
            return _too_much(costs, name, where)
    if len(ranked) == 1:
        return "no other backend can serve this call"
    second = ranked[1]
    other = costs[second]
    own = chosen.parts
    others = other.parts
    _, part = max((others[part] - own[part], part) for part in own)
    times = other.seconds / chosen.seconds
    return (
        f"its {part} take {own[part] * 1e3:.3g} ms where those of {second} take "
        f"{others[part] * 1e3:.3g} ms: {second} is predicted to take {times:.2f} times as long on "
        f"{where}"
    )


def _too_much(costs: Mapping[str, Cost], backend: str, where: str) -> str:
    held = costs[backend].held / 2**30
    return f"{backend} would hold {held:.1f} GiB beside its operands, too much for each of {where}"
