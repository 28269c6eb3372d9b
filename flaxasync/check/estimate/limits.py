"""What the estimate of a program does not know, in sentences for its reader.

Each limit concerns programs that the reader and the audit understand, but for which some times are those of other
hardware.
"""

from flaxasync.check.hlo.module import HloModule
from flaxasync.check.hlo.shapes import HOST

_GPU_CALLS = ("__cublas", "__cudnn", "__cusolver", "__triton")
_GPU_NOTES = ('"operation_queue_id"', '"__triton')  # in a backend_config: XLA for GPUs writes the first to what it runs


def limits(module: HloModule, chip: str) -> list[str]:
    """Returns what a reader should know about the times of a program that are taken from the chip of that name."""
    instructions = [i for computation in module.computations.values() for i in computation.instructions]
    between_slices = sum(
        i.opcode == "send" and "megascale" in i.attributes.get("frontend_attributes", "") for i in instructions
    )
    copies = [i for i in instructions if i.opcode in ("copy", "copy-start", "async-start")]
    with_host = sum(any(leaf.memory_space == HOST for _, leaf in i.shape.leaves()) for i in copies)
    configs = [i.attributes.get("backend_config", "") for i in instructions]
    on_gpu = any(i.custom_call_target.startswith(_GPU_CALLS) for i in instructions) or any(
        note in config for config in configs for note in _GPU_NOTES
    )
    notes = []
    if on_gpu:
        notes.append(
            f"this is a program for GPUs, whose times are not known: all times and gains are as on a {chip}; what runs "
            "in a window, and the rules, are facts of the text"
        )
    if between_slices:
        notes.append(
            f"{_transfers(between_slices)} between slices, over a network whose speed the text does not name: timed as "
            f"on a link of a {chip}, which is faster"
        )
    if with_host:
        notes.append(f"{_transfers(with_host)} to or from the memory of the host: timed as within HBM, which is faster")
    return notes


def _transfers(count: int) -> str:
    return f"{count} transfer{'s' if count > 1 else ''} go{'es' if count == 1 else ''}"
