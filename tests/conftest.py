"""The settings of every test process: eight CPU devices, libtpu as a compiler without a TPU, and a
watchdog.
"""

import faulthandler
import gc
import os

# These variables must be set before jax is imported. Tests that compile for a TPU topology need the
# TPU_* variables, and several processes must be able to load libtpu at once.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    OPENBLAS_NUM_THREADS="1",  # its threads wait by spinning
)

import hypothesis
import jax
import pytest

WATCHDOG_SECONDS = 420  # a deadlocked collective never returns; no test takes half of this time

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# There is no deadline, because compilation takes much longer than a test body and its time varies.
# The examples are derandomized, so that a failure is caused by the change and not by the draw.
hypothesis.settings.register_profile("flaxasync", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("flaxasync")


def pytest_collection_modifyitems(items):
    """Runs the folders with the longest tests first: a long test at the end would leave the other
    worker idle.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/train/", "tests/verify/")))


def pytest_collection_finish():
    """Collects garbage less often, because tracing makes many objects, and few of them are in
    cycles.

    The objects that exist now, mostly imported modules, are left out of all later collections.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def watchdog():
    """Prints the stack of every thread and ends the process if a test hangs."""
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


# Folders whose quick tests run where JAX raises instead of adding dimensions to arrays of different
# ranks. The other tests have programs of strangers as well, such as plain decoders to compare with.
WITHOUT_RANK_PROMOTION = tuple(
    f"tests/{name}/" for name in ("nn", "ops", "models", "transport", "kernels", "simulator")
)


@pytest.fixture(autouse=True)
def rank_promotion(request):
    """Runs layers, ops, kernels and the decoder with jax_numpy_rank_promotion="raise"."""
    is_quick = request.node.get_closest_marker("slow") is None
    raises = is_quick and request.node.nodeid.startswith(WITHOUT_RANK_PROMOTION)
    with jax.numpy_rank_promotion("raise" if raises else "allow"):
        yield


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """The cache folder of a user who has verified nothing, and has not said what to trust."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FLAXASYNC_VERIFIED", raising=False)


@pytest.fixture
def quick_compile(request):
    """Compiles with few optimizations, which takes about half the time, for tests that look at
    values only.

    The mark `optimized` exempts a test.
    """
    if request.node.get_closest_marker("optimized"):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
