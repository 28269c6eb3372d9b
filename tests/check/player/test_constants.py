"""Integer constants: their elements in the text of a program, and the words of scalar memory that kernels read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import flaxasync as fa
from flaxasync.check.hlo.reader import parse
from flaxasync.check.player import kernels
from flaxasync.check.player.memory import integer_elements, words
from flaxasync.check.player.play import play_dump

TEXT = """HloModule m, is_scheduled=true
ENTRY main {
  a = f32[8,128]{1,0:T(8,128)} parameter(0)
  four = s32[4]{0:T(128)} constant({4, 1, -3, 0})
  zero = s32[]{:T(128)} constant(0)
  same = s32[2,2]{1,0:T(2,128)} bitcast(four)
  zeros = s32[4]{0:T(128)} broadcast(zero), dimensions={}
  moved = s32[4]{0:T(128)} copy(zeros)
  long = s32[4]{0:T(128)} constant({...})
  ROOT n = f32[8,128]{1,0:T(8,128)} negate(a)
}
"""


@pytest.mark.parametrize(
    ("name", "elements"),
    [("same", [4, 1, -3, 0]), ("moved", [0]), ("long", None), ("a", None), ("n", None), ("absent", None)],
)
def test_the_text_determines_constants_and_what_is_copied_from_them(name, elements):
    assert integer_elements(parse(TEXT).entry.by_name, name) == elements


def shape_of(text):
    return parse(f"HloModule m\nENTRY main {{\n  ROOT a = {text} parameter(0)\n}}\n").entry.root.shape


@pytest.mark.parametrize(
    ("text", "elements", "expected"),
    [
        ("s32[3]{0:T(128)}", [7, -1, 2], {0: 7, 1: 2**32 - 1, 2: 2}),
        ("s32[]{:T(128)}", [5], {0: 5}),
        ("s32[3]{0:T(128)}", [5], {0: 5, 1: 5, 2: 5}),  # repeated
        ("s32[2,129]{1,0:T(2,128)}", [*[0] * 128, 1, 2, *[0] * 127, 3], {256: 1, 128: 2, 384: 3}),  # two tiles
        ("s32[2,3]{0,1:T(4,128)}", [1, 2, 3, 4, 0, 0], {0: 1, 1: 4, 128: 2, 256: 3}),  # turned
        ("s8[10]{0:T(512)(128)(4,1)}", [1, -1, *[0] * 8], {0: 1, 1: 255}),
        ("s8[4,2]{1,0:T(4,128)(4,1)}", [*range(8)], {0: 0x06040200, 1: 0x07050301}),  # four rows in a word
        ("u16[2,1]{1,0:T(2,128)(2,1)}", [3, 4], {0: 0x00040003}),  # two rows in a word
    ],
)
def test_words_lie_tile_by_tile(text, elements, expected):
    found = words(shape_of(text), elements)
    assert {n: word for n, word in enumerate(found) if word or n in expected} == expected


@pytest.mark.parametrize("text", ["bf16[4]{0:T(512)(128)(2,1)}", "s32[4]", "s8[4]{0:T(128)}", "s64[4]{0:T(128)}"])
def test_what_lies_in_another_way_has_no_words(text):
    assert words(shape_of(text), [1, 2, 3, 4]) is None


def compiled(steps, folder=False, dtype=jnp.int32, *, argument=False):
    """Compiles a kernel whose steps look up in a table whether they multiply; the first two of a constant table do."""

    def body(table, x, y, o):
        @pl.when(table[pl.program_id(0)].astype(jnp.int32) > 0)
        def _():
            o[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    spec = pl.BlockSpec((512, 512), lambda i, table: (0, 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(steps,), in_specs=[spec, spec], out_specs=spec)
    call = pl.pallas_call(body, jax.ShapeDtypeStruct((512, 512), jnp.float32), grid_spec=grid)
    table = (np.arange(steps) < 2).astype(dtype)
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    if argument:
        return fa.check.compile_for("v5e:1x1", call, jax.ShapeDtypeStruct((steps,), dtype), x, x, keep_dumps=folder)
    return fa.check.compile_for("v5e:1x1", lambda x, y: call(table, x, y), x, x, keep_dumps=folder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8], ids=["words", "bytes"])
def test_a_kernel_reads_its_table(dtype, tmp_path):
    """Two of sixteen steps multiply; with a table of zeros none would."""
    played = play_dump(compiled(16, tmp_path, dtype).dumps, topology="v5e:1x1")
    product = 2 * 512**3 / fa.check.CHIPS["v5e"].flops
    assert played.slowest.matrix_busy == pytest.approx(2 * product, rel=0.1)
    assert not [note for note in played.notes if "taken as 0" in note]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "argument", "known"),
    [(8, False, True), (16, False, False), (8, True, False)],
    ids=["in the text", "left out of the text", "an argument"],
)
def test_a_kernel_whose_table_is_not_known_is_named(steps, argument, known, tmp_path, monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, str(tmp_path))
    timeline = fa.check.timeline(compiled(steps, argument=argument), kernels="play")
    assert known != any(
        "with 0 for scalars that the text of the program does not determine" in n for n in timeline.notes
    )
