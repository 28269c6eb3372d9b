"""Which heads or vocabulary entries each device computes with, also where the axis does not divide
their number.

A parameter keeps the shape of the dense model where its split dimension cannot be shared out
equally: 6 heads or 50257 entries on 4 devices, or 2 key-value heads that 2 devices need each. It is
sharded along its other dimension; where the axis does not divide that either, every device holds
all of it. One all-to-all turns a sharded one into the shares that the devices compute with, of
which some are padding (zeros) or copies. The transpose of this drops the padding and sums the
copies, so gradients, optimizer states and checkpoints have the dense shape too.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from flaxasync.mesh import cast_to_varying


@dataclasses.dataclass(frozen=True)
class Shares:
    """The entries of one dimension that each device computes with.

    `order` has the entries of all devices, one device after the other, and -1 for padding. None
    stands for all entries in order, with padding at the end.
    """

    size: int  # the entries of the dimension, each of `block` features
    devices: int  # the devices of the axis
    local: int  # the entries on a device, padding included
    block: int = 1  # the features of an entry: head_dim for heads, 1 for a vocabulary
    order: tuple[int, ...] | None = None

    @classmethod
    def equal(cls, size: int, devices: int, block: int = 1) -> "Shares":
        """Returns consecutive shares, of which the last ones are padded."""
        return cls(size, devices, -(-size // devices), block)

    @property
    def whole(self) -> bool:
        """Whether the devices hold the dimension in order, without padding or copies."""
        return self.order is None and self.local * self.devices == self.size

    def spec(self, axis_name: str, shape: tuple[int, ...], dim: int) -> P:
        """Returns how a parameter lies on the devices, such as [in, out] or [out], whose dimension
        `dim` they share.
        """
        entries: list[str | None] = [None] * len(shape)
        if self.whole:
            entries[dim] = axis_name
        elif len(shape) > 1 and shape[_other(dim, len(shape))] % self.devices == 0:
            entries[_other(dim, len(shape))] = axis_name
        return P(*entries)

    def take(self, parameter: Array, axis_name: str, dim: int) -> Array:
        """Returns this device's share of a parameter that lies on the devices as `spec` says.
        Inside shard_map.
        """
        if self.whole:
            return parameter
        with jax.named_scope("take_share"):
            expanded = self._expand(parameter, dim)
            if parameter.ndim > 1 and axis_name in jax.typeof(parameter).mat.varying:
                other = _other(dim, parameter.ndim)
                return lax.all_to_all(
                    expanded, axis_name, split_axis=dim, concat_axis=other, tiled=True
                )
            return self._slice(expanded, axis_name, dim)

    def local_entries(self, x: Array, axis_name: str, dim: int) -> Array:
        """Returns this device's entries of an array with one element an entry, the same on all
        devices.
        """
        per_entry = dataclasses.replace(self, block=1)
        return per_entry._slice(per_entry._expand(x, dim), axis_name, dim)

    def mask_padding(self, logits: Array, axis_name: str) -> Array:
        """Returns this device's logits [..., local] with the least number in the padding, so that
        it wins no argmax.
        """
        if self.whole:
            return logits
        entries = lax.axis_index(axis_name) * self.local + jnp.arange(self.local, dtype=jnp.int32)
        return jnp.where(entries < self.size, logits, jnp.finfo(logits.dtype).min)

    def _slice(self, expanded: Array, axis_name: str, dim: int) -> Array:
        rows = self.local * self.block
        expanded = cast_to_varying(expanded, {axis_name})
        return lax.dynamic_slice_in_dim(expanded, lax.axis_index(axis_name) * rows, rows, dim)

    def _expand(self, x: Array, dim: int) -> Array:
        """Returns the entries of all devices along `dim`."""
        if self.order is None:
            padding = [(0, 0, 0)] * x.ndim
            padding[dim] = (0, (self.local * self.devices - self.size) * self.block, 0)
            return lax.pad(x, jnp.zeros((), x.dtype), padding)
        shape = x.shape
        x = x.reshape(*shape[:dim], self.size, self.block, *shape[dim + 1 :])
        index = jnp.array([self.size if entry < 0 else entry for entry in self.order], jnp.int32)
        x = jnp.take(x, index, axis=dim, mode="fill", fill_value=0)
        return x.reshape(*shape[:dim], len(self.order) * self.block, *shape[dim + 1 :])


def _other(dim: int, dims: int) -> int:
    """Returns the dimension along which a parameter is stored whose dimension `dim` cannot be
    shared out equally.
    """
    if dim == dims - 1:
        return 0
    return dims - 1


def head_shares(heads: int, kv_heads: int, head_dim: int, devices: int) -> tuple[Shares, Shares]:
    """Returns which query heads and which key-value heads each device has, so that every group
    finds its own.

    With fewer key-value heads than devices, devices in a row share one, and split its group of
    query heads.
    """
    group = heads // kv_heads
    if kv_heads % devices == 0:
        return Shares.equal(heads, devices, head_dim), Shares.equal(kv_heads, devices, head_dim)
    if devices % kv_heads == 0:
        sharers = devices // kv_heads
        local = -(-group // sharers)
        order = []
        for device in range(devices):
            kv_head = device // sharers
            first = device % sharers * local
            order += [
                kv_head * group + first + i if first + i < group else -1 for i in range(local)
            ]
        kv_order = tuple(device // sharers for device in range(devices))
        query = Shares(heads, devices, local, head_dim, tuple(order))
        if order == list(range(heads)):
            query = Shares.equal(heads, devices, head_dim)
        return query, Shares(kv_heads, devices, 1, head_dim, kv_order)
    kv = Shares.equal(kv_heads, devices, head_dim)
    return Shares(heads, devices, kv.local * group, head_dim), kv
