"""Quantised operands: values and scales, how cotangents are rounded, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import flaxasync as fa
from flaxasync import hardware
from flaxasync.ops.quantization import (
    MAX_INT8_PRODUCTS,
    backward_operands,
    check_chip,
    dequantize,
    quantization_of,
    quantize,
)

FORWARD = {"int8": (127, np.int8), "fp8": (448, ml_dtypes.float8_e4m3fn)}


def quantized(x, kind, contracted):
    """Returns the values and the scales of the NumPy model."""
    largest, type_ = FORWARD[kind]
    most = np.abs(x).max(contracted, keepdims=True)
    scales = np.where(most > 0, most * np.float32(1 / largest), np.float32(1)).astype(np.float32)
    ratio = np.clip(x / scales, -largest, largest)
    return (np.round(ratio) if kind == "int8" else ratio).astype(type_), scales


@pytest.mark.parametrize("contracted", [-1, 0])
@pytest.mark.parametrize("kind", FORWARD)
def test_values_and_scales_are_those_of_the_model(kind, contracted):
    x = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    x[3, 4], x[5], x[:, 6] = 1e4, 0, 0  # an outlier, a row and a column of zeros
    values, scales = quantized(x, kind, contracted)

    @jax.jit
    def both(x):
        got = quantize(x, kind, contracted)
        return got, dequantize(got, contracted)

    got, back = both(x)
    np.testing.assert_array_equal(np.asarray(got.values, np.float32), values.astype(np.float32))
    np.testing.assert_array_equal(got.scales, scales.squeeze(contracted))
    np.testing.assert_array_equal(back, values.astype(np.float32) * scales)


@pytest.mark.parametrize(
    ("kind", "rounding"),
    [
        ("int8", None),
        ("fp8", "stochastic"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("int8", "stochastic"), ("fp8", None))
        ),
    ],
)
def test_rows_that_are_not_finite_stay_so_and_small_rows_stay_finite(kind, rounding):
    x = np.array(
        [[1, -np.inf, 2], [np.nan, 1, 2], [0, 0, 0], [1e-45, 0, -1e-45], [3e38, -3e38, 1]],
        np.float32,
    )
    rounded = jax.jit(lambda x: dequantize(quantize(x, kind, -1, rounding=rounding)))
    got = np.asarray(rounded(x))
    assert got[0, 1] == -np.inf
    assert not np.isfinite(got[:2]).any()
    assert np.isfinite(got[2:]).all()
    np.testing.assert_allclose(got[4], x[4], atol=2e36)
    # rows of one element are exact
    assert rounded(np.ones((3, 1), np.float32)).tolist() == [[1.0]] * 3


@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 127), ("fp8", 2**-2)])
def test_stochastic_rounding_is_right_on_average(kind, step):
    """Each value is rounded to one of its two neighbours, and the mean of many is the value; to
    nearest it is not.
    """
    x = np.full((20_000, 2), 0.3, np.float32)
    x[:, 1] = 1
    x[:, 0] += np.linspace(0, 1e-6, len(x))

    def rounded(rounding):
        fn = jax.jit(lambda x: dequantize(quantize(x, kind, -1, rounding=rounding)))
        return np.asarray(fn(x))[:, 0]

    got = rounded("stochastic")
    assert len(np.unique(got.round(5))) == 2
    assert np.ptp(got) <= step
    bound = 4 * step / np.sqrt(len(x))
    assert abs(got.mean() - 0.3) < bound
    assert abs(rounded("nearest").mean() - 0.3) > bound


def test_a_scale_of_the_whole_array_and_a_float64_operand():
    x = np.random.default_rng(0).standard_normal((4, 6))
    of_tensor = jax.jit(lambda x: quantize(x, "int8", -1, scale="tensor"))
    assert np.unique(of_tensor(x.astype(np.float32)).scales).size == 1
    with jax.enable_x64(True):
        got, back = jax.jit(lambda x: (q := quantize(x, "int8", -1), dequantize(q)))(x)
        assert got.scales.dtype == back.dtype == jnp.float64
        np.testing.assert_allclose(back, x, atol=np.abs(x).max() / 127)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            "forward to be one of 'int8', 'fp8': got 'int4'",
            lambda: fa.Quantization("int4"),
        ),
        (
            ValueError,
            "backward to be one of None, 'int8', 'fp8': got 'bf16'",
            lambda: fa.Quantization("int8", "bf16"),
        ),
        (
            ValueError,
            "weights to be None, or the type of both forward and backward: got 'int8', 'int8' and "
            "None",
            lambda: fa.Quantization("int8", weights="int8"),
        ),
        (ValueError, "rounding to be one of", lambda: fa.Quantization("int8", rounding="up")),
        (
            ValueError,
            "scale to be one of 'vector', 'tensor'",
            lambda: fa.Quantization("int8", scale="row"),
        ),
        (
            ValueError,
            "^an op needs quantization to be .*: got 'int4'",
            lambda: quantization_of("an op", "int4"),
        ),
        (
            NotImplementedError,
            f"int32, which holds {MAX_INT8_PRODUCTS} .*: got {MAX_INT8_PRODUCTS + 1} features",
            lambda: jax.eval_shape(
                lambda x: quantize(x, "int8", -1),
                jax.ShapeDtypeStruct((1, MAX_INT8_PRODUCTS + 1), jnp.bfloat16),
            ),
        ),
        (
            NotImplementedError,
            f"holds {MAX_INT8_PRODUCTS} .*: got {2 * MAX_INT8_PRODUCTS} rows in dw; use a Quant",
            lambda: jax.eval_shape(
                lambda x: quantize(x, "int8", (0, 1)),
                jax.ShapeDtypeStruct((2, MAX_INT8_PRODUCTS, 1), jnp.bfloat16),
            ),
        ),
    ],
)
def test_what_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_cotangents_are_joined_where_int32_holds_their_sum():
    for kind, width, joined in (
        ("int8", MAX_INT8_PRODUCTS // 2, True),
        ("int8", MAX_INT8_PRODUCTS, False),
        ("fp8", MAX_INT8_PRODUCTS, True),
    ):
        dys, ws = (
            tuple(jax.ShapeDtypeStruct((rows, width), jnp.bfloat16) for _ in range(2))
            for rows in (1, 4)
        )
        made = jax.eval_shape(
            lambda dys, ws, kind=kind: backward_operands(fa.Quantization(kind, kind), dys, ws),
            dys,
            ws,
        )
        assert [len(operands) for operands in made] == ([1, 1] if joined else [2, 2])


def test_types_for_which_a_chip_has_no_rate():
    for name, has, lacks in (
        ("v5e", "int8", "fp8"),
        ("v6e", "int8", "fp8"),
        ("tpu7x", "fp8", "int8"),
    ):
        chip = hardware.chip(name)
        assert chip.rate(has) == 2 * chip.flops
        check_chip("an op", fa.Quantization(has), chip)
        message = (
            f"^an op got quantization in {lacks}, for which a {name} has no rate .*; use "
            f"quantization='{has}' or qua"
        )
        for quantization in (fa.Quantization(lacks), fa.Quantization(has, lacks)):
            with pytest.raises(NotImplementedError, match=message):
                check_chip("an op", quantization, chip)
            check_chip("an op", quantization, None)  # CPUs take every type
