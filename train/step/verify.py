"""Verifies the kernels that a run would use, on the chips that it will run on, before it opens
them.

A TPU belongs to one process at a time, so the check runs in child processes that end before this
one asks JAX for a device, or for its rank. Verdicts are stored, and a run whose cases all have one
starts at once. `backend=auto` does not take kernels that fail; a backend that was named and fails
ends the run.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from flaxasync.check.progress import progress
from flaxasync.hardware import CHIPS
from flaxasync.kernels.flash_attention import unsupported as flash_lacks
from flaxasync.ops import trust
from flaxasync.verify.__main__ import record_verdicts, verify
from flaxasync.verify.cases import IN_8_BITS, PAIRS, Case
from flaxasync.verify.child import Setup
from flaxasync.verify.supervisor import MachineError, describe
from flaxasync.verify.verdict import Verdict
from train.config import Config
from train.lifecycle.errors import InputError
from train.metrics.output import print_line
from train.step.flags import may_have_tpus
from train.step.mesh import CONTEXT, FSDP, axis_sizes, batch_shards, infer_sizes, no_devices
from train.step.products import local_heads, products_of_a_layer

type Verify = Literal["auto", "off"]
# what `fa.plan` may choose for the collective matmuls of a training step
KERNELS = ("pallas", "fused")
LIMIT = 120  # seconds for one case
# what JAX says of a machine without a TPU, or without libtpu
_NO_TPU = "Unable to initialize backend 'tpu'"


def verify_first(config: Config, mode: Verify, *, setup: Setup | None = None) -> None:
    """Verifies what a run on TPUs would use, unless that is known or not wanted; `setup` starts
    child processes.

    The mode "auto" verifies the ops and shapes of the configuration if they have no verdicts, and
    "off" nothing.
    """
    if (
        mode == "off"
        or os.environ.get(trust.VARIABLE) in ("all", "none")
        or not may_have_tpus(config)
    ):
        return
    sizes = axis_sizes(config.mesh)
    are_known = min(sizes.values()) > 0  # -1 is inferred from the chips below
    if are_known and _have_verdicts(config, cases_of(config, sizes)):
        return
    setup = setup or setup_of(config)
    machine = describe_machine(setup, "; --verify off skips this")
    if machine["platform"] != "tpu":
        return
    cases = cases_of(config, infer_sizes(sizes, machine["devices"], "tpu"))
    if _have_verdicts(config, cases):  # of the sizes that were inferred
        return
    print_line(f"verify     {len(cases)} cases on {machine['kind']}, once; --verify off skips this")
    results = verify(cases, machine, setup)
    stored = record_verdicts(results, machine)
    if stored is not None:
        print_line(f"verify     the verdicts are in {stored}")
    not_run = [r.reason for r in results if r.verdict is Verdict.NOT_RUN]
    if not_run:
        raise InputError(
            f"{len(not_run)} of {len(cases)} cases could not be verified: {not_run[0]}"
        )
    bad = [result for result in results if result.verdict.bad]
    named = [result for result in bad if _is_named(config, result.case)]
    failed = {f"{r.case.op} {r.verdict}" for r in named if r.case.op != "prefetch"}
    if failed:
        raise InputError(
            f"backend={config.backend} fails on this machine: {', '.join(sorted(failed))}; use "
            "--backend auto, or --verify off"
        )
    copies = [r.verdict for r in named if r.case.op == "prefetch"]
    if copies:
        raise InputError(
            f"model.fsdp_overlap=prefetch_pallas fails on this machine: {copies[0]}; leave it out, "
            "or use --verify off"
        )


def setup_of(config: Config) -> Setup:
    """Returns how child processes of a run open its devices."""
    return Setup(platform="tpu" if config.mesh.platform == "tpu" else None, limit=LIMIT)


def describe_machine(setup: Setup, advice: str = "") -> dict[str, Any]:
    """Returns what the devices of this machine are, which a child process opens; `advice` ends the
    error.
    """
    try:
        with progress("looking for TPUs"):
            return describe(setup)
    except MachineError as error:
        first, *others = str(error).strip().splitlines()
        if _NO_TPU in str(error):
            last_line = [first, *others][-1]
            raise InputError(no_devices("tpu", last_line[last_line.find(_NO_TPU) :])) from error
        # The last words of the child may be a traceback, of which the last line says what happened.
        said = f"{first.partition('; its last words')[0]}: {others[-1]}" if others else first
        raise InputError(f"the TPU could not be verified: {said}{advice}") from error


def cases_of(config: Config, sizes: Mapping[str, int]) -> list[Case]:
    """Returns the kernels that a run may take on a mesh, each with the plain backend beside it, at
    the run's shapes.
    """
    ring = sizes["model"]
    context = sizes.get(CONTEXT, 1)
    model = config.model
    dtype = model.dtype
    head = model.head_features
    batch = max(config.data.batch_size // (batch_shards(sizes) * config.data.microbatches), 1)
    rows = config.data.sequence_length // context
    heads, kv_heads = local_heads(model, ring)
    products = set(products_of_a_layer(model, batch=batch, length=rows, ring=ring))
    named: tuple[str, ...] = (config.backend,)
    if config.backend == "auto":
        named = KERNELS
    kernels = [name for name in named if name not in trust.PLAIN]
    in_8_bits = {model.quantization, model.quantization_backward}
    verified_kinds = []
    if "fused" in kernels:
        verified_kinds = sorted(kind for kind in in_8_bits if kind is not None)
    cases = []
    if ring > 1 and kernels:
        for op, x, w in sorted(products):
            cases += [Case(op, backend, (ring,), (x, w), dtype) for backend in ("none", *kernels)]
            for kind in verified_kinds:
                cases += [
                    Case(op, backend, (ring,), (x, w), dtype, quantization=kind)
                    for backend in IN_8_BITS
                ]
    if ring > 1 and context == 1 and config.backend == "auto" and model.exchange_heads is None:
        # What one sequence exchanges; attention takes it only if it is verified.
        block = (ring * (heads + 2 * kv_heads) * head, rows // ring)
        cases += [Case("all_to_all", name, (ring,), (block,), dtype) for name in ("xla", "pallas")]
    fsdp = sizes.get(FSDP, 1)
    if (
        fsdp > 1
        and model.width % (128 * fsdp) == 0
        and model.fsdp_overlap in (None, "prefetch_pallas")
    ):
        hidden = model.expert_features if model.experts else model.mlp_width // ring
        shard = (hidden, model.width // fsdp)
        cases += [Case("prefetch", name, (fsdp,), (shard,), dtype) for name in ("xla", "pallas")]
    q = (batch, rows, heads, head)
    k = (batch, rows, kv_heads, head)
    if context > 1:
        travel = config.backend if config.backend in PAIRS else "pallas"
        cases += [
            Case("ring_attention", backend, (context,), (q, k), dtype)
            for backend in ("none", travel)
        ]
    # Flash that refuses the shapes gets no verdict, so that every start would ask again.
    if flash_lacks(jnp.dtype(dtype), head, rows, rows) is None:
        cases += [
            Case("attention", kernel, (1,), (q, k), dtype) for kernel in ("reference", "flash")
        ]
    return cases


def _is_named(config: Config, case: Case) -> bool:
    """Says whether a configuration names the kernel of a case, instead of taking what is trusted.

    model.fsdp_overlap names the kernel of prefetch, and config.backend all others.
    """
    if case.op == "prefetch":
        return case.backend == "pallas" and config.model.fsdp_overlap == "prefetch_pallas"
    return case.backend == config.backend


def _have_verdicts(config: Config, cases: list[Case]) -> bool:
    """Says whether all cases have verdicts, for one kind of chip with the versions that are
    installed. A kernel that was named and failed is verified again.
    """
    kernels = [case for case in cases if case.backend not in trust.PLAIN]
    if not kernels:
        return True
    for chip in CHIPS:
        machine = trust.Machine.here(chip)
        if machine.file.exists():
            stored = trust.read(machine)["verdicts"]
            if all(_has_verdict(config, case, stored) for case in kernels):
                return True
    return False


def _has_verdict(config: Config, case: Case, stored: Mapping[str, Mapping[str, str]]) -> bool:
    name = trust.key(case.op, case.backend, case.mesh, case.quantization)
    verdict = stored.get(name, {}).get(case.text)
    if _is_named(config, case):
        return verdict == Verdict.PASS
    return verdict in tuple(Verdict)
