"""How long each instruction takes on a GPU, estimated from the text of the program.

XLA for GPUs writes no estimates of its own. A product takes its FLOPs at the share of the peak that
large products reach, or its bytes in HBM, whichever is longer; other work takes its bytes. Each
kernel takes the time until the next one has begun, too. Transfers are those of NCCL: within a host
every GPU sends and receives at the rate of all its NVLinks, to whichever GPU; between hosts each
GPU has one network card.

Two things are not modelled. While NCCL moves bytes, it occupies some of the multiprocessors. And
where there is a GPU, XLA chooses tiles and algorithms of products by their times.
"""

import dataclasses
from collections.abc import Sequence

from flaxasync.check.estimate.costs import FREE_CALLS, NO_TIME, CoreTime, Costs
from flaxasync.check.estimate.moved_bytes import moved_bytes
from flaxasync.check.estimate.product_flops import flops_of
from flaxasync.check.hlo import gpu_calls
from flaxasync.check.hlo.async_operations import COLLECTIVES, AsyncOperation
from flaxasync.check.hlo.module import CONTROL_FLOW, Instruction
from flaxasync.check.hlo.participants import groups_in, permute_pairs
from flaxasync.check.hlo.shapes import HOST
from flaxasync.hardware import Gpu

NVLINK = "NVLink"  # the lane of transfers within a host
NETWORK = "network"  # the lane of transfers between hosts
GPUS_OF_HOST = 8  # where the program does not say
# Of `Gpu.flops`, for operands of float32 that may be rounded to TF32, as by JAX's default precision.
_TF32_SHARE = 1 / 2
# Transfers from one device to another one, of whole operands.
WHOLE = ("collective-permute", "collective-broadcast", "send", "recv")
# Those whose bytes between two hosts go by the cards of all their GPUs. No other card helps to send
# what one GPU has for another one.
_SHARED_BY_CARDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class GpuCosts(Costs):
    """The times of the instructions of one module on one GPU, in seconds."""

    hosts: tuple[int, ...] = ()  # the host of each partition; () for eight on each host

    @property
    def gpu(self) -> Gpu:
        assert isinstance(self.chip, Gpu)
        return self.chip

    def lane(self, operation: AsyncOperation) -> str:
        collective = operation.inner or operation.start
        if self._hosts_of(collective) > 1:
            return NETWORK
        return NVLINK

    def transfer_seconds(self, operation: AsyncOperation) -> float:
        inner = operation.inner
        if not operation.communicates and inner is not None and inner.opcode != "copy":
            return self._work(inner).seconds  # on a second stream
        return super().transfer_seconds(operation)

    def memory_latency(self) -> float:
        return 0.0

    def _ends_in_hbm(self, copy: AsyncOperation) -> int:
        return 2

    def _explain(self, i: Instruction) -> CoreTime:
        if i.opcode in CONTROL_FLOW or i.opcode in COLLECTIVES:
            return super()._explain(i)
        return self._work(i)

    def _work(self, i: Instruction) -> CoreTime:
        """Returns the time of a kernel, or of a library's call."""
        given = self._given(i.name)
        if given is not None:
            return CoreTime(given, "given")
        if i.custom_call_target in FREE_CALLS:
            return NO_TIME
        moving = self._bytes_seconds(i)
        multiplying = self._flops(i) / self._rate(gpu_calls.product_of(i) or i)
        begun = self.gpu.kernel_latency
        if multiplying > 0:
            return CoreTime(max(multiplying, moving) + begun, "flops")
        return CoreTime(moving + begun, "bytes")

    def _flops(self, i: Instruction) -> float:
        if gpu_calls.is_product(i):
            return gpu_calls.product_flops(i)
        if gpu_calls.is_attention(i):
            return gpu_calls.attention_flops(i) / self.gpu.attention_share
        known: dict[str, float] = {}
        return sum(flops_of(body, known) for body in i.called)

    def _rate(self, product: Instruction) -> float:
        """Returns the FLOP/s that a product reaches, by the type of its first operand."""
        gpu = self.gpu
        kind = ""
        if product.operands:
            kind = product.inputs[0].shape.element_type
        peak: float | None = gpu.flops
        if kind == "f32" and gpu_calls.is_rounded(product):
            peak = gpu.flops * _TF32_SHARE
        elif kind == "f32":
            peak = gpu.float32
        elif kind == "f64":
            peak = gpu.float64
        elif kind.startswith("f8"):
            peak = gpu.fp8
        elif kind in ("s8", "u8"):
            peak = gpu.int8
        return (peak or gpu.flops) * gpu.product_share

    def _bytes_seconds(self, i: Instruction) -> float:
        if gpu_calls.is_product(i):
            read = sum(made.shape.bytes for made in i.inputs)
            moved = read + gpu_calls.product_result(i).bytes
        else:
            moved = sum(size for space, size in moved_bytes(i) if space != HOST)
            moved -= gpu_calls.returned_workspace(i)
        return self.memory_seconds(moved)

    def _collective_seconds(
        self,
        collective: Instruction,
        kind: str,
        sent: int,
        received: int,
        *,
        beside: Sequence[Instruction],
    ) -> float:
        group = self.group_size(collective)
        if group < 2:
            return 0.0
        gpu = self.gpu
        hosts = self._hosts_of(collective)
        seconds = sent_on_switch(kind, sent, received, group) / gpu.link_bandwidth
        if hosts > 1:
            cards = group // hosts  # of one host that take part
            if kind not in _SHARED_BY_CARDS:
                cards = 1
            between = sent_on_switch(kind, sent, received, hosts) / cards
            seconds = max(seconds, between / gpu.network_bandwidth)
        return gpu.hop_latency + seconds / gpu.link_share

    def _hosts_of(self, collective: Instruction) -> int:
        """Returns the most hosts that a group of a collective, or a pair of a permute, is on."""
        groups = permute_pairs(collective) or groups_in(collective)
        return max(len({self._host(device) for device in group}) for group in groups)

    def _host(self, device: int) -> int:
        if device < len(self.hosts):
            return self.hosts[device]
        return device // GPUS_OF_HOST


def sent_on_switch(opcode: str, bytes_in: int, bytes_out: int, group: int) -> float:
    """Returns the bytes that one device of a group sends where every device reaches every other.

    `bytes_in` and `bytes_out` are those of its operand and its result.
    """
    share = (group - 1) / group
    if opcode == "all-gather":
        return bytes_out * share
    if opcode == "all-reduce":
        return 2 * bytes_in * share
    if opcode in WHOLE:
        return bytes_in
    return bytes_in * share
