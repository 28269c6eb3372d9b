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
    between_slices = with_host = 0
    on_gpu = False
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.opcode == "send":
                between_slices += "megascale" in i.attributes.get("frontend_attributes", "")
            elif i.opcode in ("copy", "copy-start", "async-start"):
                with_host += any(leaf.memory_space == HOST for _, leaf in i.shape.leaves())
            elif i.opcode == "custom-call":
                on_gpu = on_gpu or i.custom_call_target.startswith(_GPU_CALLS)
            on_gpu = on_gpu or any(note in i.attributes.get("backend_config", "") for note in _GPU_NOTES)
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
