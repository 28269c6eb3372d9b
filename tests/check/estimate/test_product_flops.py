"""The FLOPs of products. Each right value is the sum of a convolution of ones, which is the number
of products that are added up in it.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flaxasync.check import parse
from flaxasync.check.estimate.product_flops import flops_of


def counted(fn, *arrays) -> float:
    text = jax.jit(fn).lower(*arrays).as_text(dialect="hlo")
    return flops_of(parse(text).entry, {})


@pytest.mark.parametrize(
    ("padding", "stride", "operand_dilation", "kernel_dilation"),
    [*itertools.product([(0, 0), (1, 3), (-1, 2), (2, 2)], [1, 2, 5], [1, 2, 6], [1, 3, 4])],
)
def test_products_with_padding_and_with_holes_are_not_counted(
    padding, stride, operand_dilation, kernel_dilation
):
    x = jnp.ones((2, 9, 4, 5))
    kernel = jnp.ones((3, 2, 5, 7))
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(stride, 1),
        padding=[padding, (0, 1)],
        lhs_dilation=(operand_dilation, 1),
        rhs_dilation=(kernel_dilation, 1),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    assert counted(convolve, x, kernel) == 2 * jnp.sum(convolve(x, kernel))


def test_a_batch_whose_window_slides_over_all_of_it():
    """XLA for TPU makes a product for each head a convolution whose window is as large as the
    number of heads, on an operand with as much padding at both ends, less one.
    """
    heads = 64
    x = jnp.ones((1, heads, 8, 16))
    kernel = jnp.ones((1, heads, 16, 4))
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding=[(0, 0), (heads - 1, heads - 1)],
        dimension_numbers=("HWNC", "HWIO", "HWNC"),
    )
    products = counted(convolve, x, kernel)
    assert products == 2 * jnp.sum(convolve(x, kernel))
    assert products == 2 * heads * heads * 8 * 16 * 4


def test_a_dot_and_one_in_a_fusion():
    x = jnp.ones((2, 8, 16))
    w = jnp.ones((2, 16, 4))
    multiply = functools.partial(jnp.einsum, "bmk,bkn->bmn")
    assert counted(multiply, x, w) == 2 * jnp.sum(multiply(x, w))
    fused = """HloModule m, is_scheduled=true

%inside (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  ROOT %d = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,16], w: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,4]{1,0} parameter(1)
  ROOT %f = f32[8,4]{1,0} fusion(%x, %w), kind=kOutput, calls=%inside
}
"""
    assert flops_of(parse(fused).entry, {}) == 2 * 8 * 16 * 4


def test_a_window_of_a_size_that_nobody_counts_is_taken_as_full():
    """So a text of a stranger cannot keep the reader busy."""
    text = """HloModule m, is_scheduled=true

ENTRY %main (a: f32[999999,4], b: f32[999999,4,4]) -> f32[999999,4] {
  %a = f32[999999,4]{1,0} parameter(0)
  %b = f32[999999,4,4]{2,1,0} parameter(1)
  ROOT %c = f32[999999,4]{1,0} convolution(%a, %b), window={size=999999}, dim_labels=0f_0io->0f
}
"""
    assert flops_of(parse(text).entry, {}) == 2 * 999999 * 4 * 999999 * 4
