"""`costs_of`: the times of a program's instructions, on a TPU or a GPU."""

from collections.abc import Mapping
from typing import Any

from flaxasync.check.estimate.costs import Costs, KernelTime
from flaxasync.check.estimate.gpu_costs import GpuCosts
from flaxasync.check.hlo.load import chip_of
from flaxasync.check.hlo.module import HloModule
from flaxasync.hardware import Chip, accelerator, is_gpu, shape_of_gpus


def costs_of(
    module: HloModule,
    chip: str,
    *,
    program: Any = None,
    kernels: Mapping[str, float] | None = None,
    copies: str = "cycles",
    played: Mapping[str, KernelTime] | None = None,
) -> Costs:
    """Returns the times of the instructions of a module on a chip, or on GPUs of a topology.

    Which devices share a host is what the topology says, or else what the module was read from,
    `program`, says.
    """
    on = accelerator(chip)
    if isinstance(on, Chip):
        return Costs(module, on, kernels or {}, copies, played or {})
    hosts = _hosts(chip, module.num_devices, program)
    return GpuCosts(module, on, kernels or {}, copies, hosts=hosts)


def _hosts(topology: str, devices: int, program: Any) -> tuple[int, ...]:
    """Returns the host of each device; () if nothing says."""
    shape = shape_of_gpus(topology)
    if shape is not None:
        gpus_of_host = shape[1]
        return tuple(device // gpus_of_host for device in range(devices))
    if is_gpu(chip_of(program)):
        places = getattr(program, "coords", ())  # of a `CompiledProgram`
        return tuple(host for _, host, _ in places)
    return ()
