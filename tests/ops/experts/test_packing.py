"""Arrays that travel as one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxasync.ops.experts.packing import pack, unpack


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_was_packed_comes_out_bit_for_bit(dtype):
    """Integers that would be floats without a value, an odd number of small elements, and rows of
    the right width.
    """
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(0)
        tree = {
            "x": jnp.asarray(rng.standard_normal((5, 12)), dtype),
            "rows": jnp.arange(-8, 7, dtype=jnp.int32).reshape(3, 5),
            "weights": jnp.asarray([[1.5, np.nan, np.inf]], jnp.float32),
            "dy": jnp.zeros((0, 12), dtype),
        }

        @jax.jit
        def there_and_back(tree):
            rows = pack(tree, 12, tree["x"].dtype)
            return rows, unpack(rows, tree)

        rows, found = there_and_back(tree)
        assert rows.dtype == f"uint{8 * tree['x'].dtype.itemsize}"
        for (path, got), want in zip(
            jax.tree.leaves_with_path(found), jax.tree.leaves(tree), strict=True
        ):
            assert got.dtype == want.dtype, path
            np.testing.assert_array_equal(got, want, err_msg=str(path))
