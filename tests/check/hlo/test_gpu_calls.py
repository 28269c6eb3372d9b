"""What the text of a program for GPUs says of its calls of libraries."""

import pytest

from flaxasync.check import HloError, audit, parse
from flaxasync.check.hlo import gpu_calls

NUMBERS = (
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}'
)
PRODUCT = """HloModule m, is_scheduled=true
ENTRY e {{
  x = bf16[8,16]{{1,0}} parameter(0)
  w = bf16[16,4]{{1,0}} parameter(1)
  c = bf16[8,4]{{1,0}} parameter(2)
  p = (bf16[8,4]{{1,0}}, s8[1024]{{0}}) custom-call(x, w{third}), custom_call_target="{target}", backend_config={config}
  ROOT y = bf16[8,4]{{1,0}} get-tuple-element(p), index=0
}}
"""
ATTENTION = """HloModule m, is_scheduled=true
ENTRY e {{
  q = bf16[2,64,4,32]{{3,2,1,0}} parameter(0)
  ROOT o = (bf16[2,4,64,32]{{3,2,1,0}}, u8[0]{{0}}) custom-call(q, q, q), custom_call_target="{target}", \
backend_config={config}
}}
"""


def product(target="__cublas$lt$matmul", beta=0, third="", numbers=NUMBERS):
    notes = f'{{"gemm_backend_config":{{"beta":{beta},"dot_dimension_numbers":{numbers}}}}}'
    text = PRODUCT.format(target=target, third=third, config=notes)
    return parse(text).entry.by_name["p"]


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_a_product_of_cublas(target):
    found = product(target)
    assert gpu_calls.is_product(found)
    assert gpu_calls.product_flops(found) == 2 * 8 * 4 * 16
    assert gpu_calls.product_result(found).bytes == 8 * 4 * 2
    assert gpu_calls.accumulated_operand(found) is None
    assert gpu_calls.is_for_gpus(found.computation.module)


def test_a_product_that_is_added_to_an_operand():
    assert gpu_calls.accumulated_operand(product(beta=1, third=", c")).name == "c"
    assert gpu_calls.accumulated_operand(product(beta=0, third=", c")) is None


FUSED = """HloModule m, is_scheduled=true, num_partitions=2
f {
  p0 = bf16[2,8,16]{2,1,0} parameter(0)
  p1 = bf16[16,4]{1,0} parameter(1)
  p2 = bf16[8,4]{1,0} parameter(2)
  s = bf16[1,8,16]{2,1,0} slice(p0), slice={[1:2], [0:8], [0:16]}
  x = bf16[8,16]{1,0} bitcast(s)
  c = bf16[8,4]{1,0} bitcast(p2)
  p = (bf16[8,4]{1,0}, s8[1024]{0}) custom-call(x, p1, c), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"beta":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  y = bf16[8,4]{1,0} get-tuple-element(p), index=0
  ROOT t = (bf16[8,4]{1,0}) tuple(y)
}
ENTRY e {
  parts = bf16[2,8,16]{2,1,0} parameter(0)
  w = bf16[16,4]{1,0} parameter(1)
  sums = bf16[8,4]{1,0} parameter(2)
  arrived = SHAPE collective-permute(SENT), source_target_pairs={{0,1},{1,0}}
  ROOT slices = (bf16[8,4]{1,0}) fusion(OPERANDS), kind=kCustom, calls=f
}
"""


@pytest.mark.parametrize(
    ("sent", "shape", "operands", "codes"),
    [
        ("sums", "bf16[8,4]{1,0}", "parts, w, arrived", {"accumulates-arrival"}),
        ("parts", "bf16[2,8,16]{2,1,0}", "arrived, w, sums", set()),  # it is multiplied
    ],
)
def test_a_product_in_a_fusion_that_slices_its_operands(sent, shape, operands, codes):
    text = FUSED.replace("SENT", sent).replace("SHAPE", shape).replace("OPERANDS", operands)
    module = parse(text)
    fusion = module.entry.root
    assert gpu_calls.product_of(fusion).name == "p"
    assert gpu_calls.product_of(module.entry.by_name["arrived"]) is None
    assert gpu_calls.returned_workspace(fusion) == 0
    workspace = text.replace(
        "ROOT t = (bf16[8,4]{1,0}) tuple(y)",
        "s8s = s8[1024]{0} get-tuple-element(p), index=1\n"
        "  ROOT t = (bf16[8,4]{1,0}, s8[1024]{0}) tuple(y, s8s)",
    ).replace("(bf16[8,4]{1,0}) fusion", "(bf16[8,4]{1,0}, s8[1024]{0}) fusion")
    assert gpu_calls.returned_workspace(parse(workspace).entry.root) == 1024
    found = audit(module, chip="h100").codes()
    assert {code for code in found if code != "synchronous-collective"} == codes


@pytest.mark.parametrize(
    "numbers",
    [
        '{"lhs_contracting_dimensions":["7"]}',
        '{"lhs_contracting_dimensions":["x"]}',
        "{}",
        "3",
        "null",
    ],
)
def test_dimensions_that_cannot_be_read_are_an_error_of_the_text(numbers):
    with pytest.raises(HloError, match=r"line 6.*'p' sums over dimensions that cannot be read"):
        gpu_calls.product_flops(product(numbers=numbers))


def test_a_product_that_says_nothing_of_its_dimensions_has_no_flops_that_are_known():
    text = PRODUCT.format(target="__cublas$gemm", third="", config='{"gemm_backend_config":{}}')
    assert gpu_calls.product_flops(parse(text).entry.by_name["p"]) == 0


def attention(target="__cudnn$fmhaSoftmax", mask="NO_MASK", sizes='["2","4","64","64"]', window=0):
    shape = f'{{"dimensions":{sizes}}}'
    fields = (
        f'{{"mask_type":"{mask}","sliding_window_length":{window},'
        f'"intermediate_tensor_shape":{shape}}}'
    )
    notes = f'{{"cudnn_fmha_backend_config":{fields}}}'
    return parse(ATTENTION.format(target=target, config=notes)).entry.root


def test_attention_of_cudnn():
    scores = 2 * 4 * 64 * 64
    assert gpu_calls.attention_flops(attention()) == 2 * 2 * scores * 32
    assert gpu_calls.attention_flops(attention(mask="CAUSAL")) == 2 * scores * 32
    backward = attention("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL")
    assert gpu_calls.attention_flops(backward) == 5 * scores * 32
    assert gpu_calls.is_attention(backward)
    assert not gpu_calls.is_product(backward)
    with_dropout = attention("__cudnn$fmhaSoftmaxBackwardDropout")
    assert gpu_calls.attention_flops(with_dropout) == 2 * 5 * scores * 32


@pytest.mark.parametrize("window", [1, 16, 63, 64, 100])
def test_attention_of_a_window_counts_its_scores(window):
    """Row i attends to the last `window` rows up to its own."""
    if window < 64:
        scores = sum(min(row + 1, window) for row in range(64))
    else:
        scores = 64 * 64 / 2  # as causal attention without a window
    found = gpu_calls.attention_flops(attention(mask="CAUSAL", window=window))
    assert found == 2 * 2 * 2 * 4 * scores * 32


def test_a_product_is_rounded_unless_it_says_otherwise():
    def precise(precision):
        config = f'{{"operand_precision":["{precision}","{precision}"]}}'
        return product(numbers=f'{NUMBERS},"precision_config":{config}')

    assert gpu_calls.is_rounded(product())
    assert gpu_calls.is_rounded(precise("DEFAULT"))
    assert not gpu_calls.is_rounded(precise("HIGHEST"))


def test_attention_without_operands_is_an_error_of_the_text():
    text = """HloModule m, is_scheduled=true
ENTRY e {
  ROOT o = (bf16[2], u8[0]) custom-call(), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","2"]}}}
}
"""
    with pytest.raises(HloError, match="does not say how many scores"):
        gpu_calls.attention_flops(parse(text).entry.root)


def test_attention_without_a_shape_of_scores_is_an_error_of_the_text():
    with pytest.raises(HloError, match=r"line 4.*'o' does not say how many scores it has"):
        gpu_calls.attention_flops(attention(sizes='["many"]'))


def test_a_program_for_tpus_is_none_for_gpus():
    text = "HloModule m\nENTRY e {\n ROOT a = f32[2]{0:T(128)} parameter(0)\n}\n"
    assert not gpu_calls.is_for_gpus(parse(text))
