"""The epilogue of a matmul kernel: what it makes of finished products before they leave vector memory."""

from typing import Protocol

from jax import Array

type Values = tuple[Array, ...]


class Epilogue(Protocol):
    """An elementwise function of the products of one x with several w, and of further operands of their shape.

    A kernel calls it for one sub-block of the result at a time, with float32 values of the same shape. The products are
    not rounded; operands are tiles that the kernel fetches from HBM. What the function returns is rounded to the dtype
    of the kernel and stored, and of the products nothing else is.

    To add one, write a frozen dataclass with these two members; Pallas must be able to lower the function for a TPU. It
    sees no arrays but its arguments.
    """

    @property
    def results(self) -> int:
        """The number of results."""
        ...

    def __call__(self, products: Values, operands: Values) -> Values:
        """Returns the results, each of the shape of a product."""
        ...
