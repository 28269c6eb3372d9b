"""What every test process has: eight CPU devices, the settings that let libtpu compile with no TPU, and a watchdog."""

import faulthandler
import os

# Before jax is imported. A test that compiles for a TPU topology needs the TPU_* names, and several processes at once.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    OPENBLAS_NUM_THREADS="1",  # its threads wait by spinning, and a fork loses them (tests/train/launcher.py)
)

import hypothesis
import jax
import pytest

WATCHDOG_SECONDS = 420  # a deadlocked collective hangs for ever; no test takes half of this

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compiling takes far longer than a test body, and varies: no deadline. One seed: a failure is the change's.
hypothesis.settings.register_profile("flaxasync", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("flaxasync")


def pytest_collection_modifyitems(items):
    """Leaves slow tests to `make test-all`, and begins with the files that take long: two workers end together."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/train/"))
    if os.environ.get("FLAXASYNC_BENCH"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow, and others of its kind run: FLAXASYNC_BENCH=1 runs it"))


@pytest.fixture(autouse=True)
def watchdog():
    """Ends the process with every thread's stack when one test hangs."""
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def quick_compile(request):
    """Compiles with few optimizations, in about half the time: for tests of values. `optimized` exempts one test."""
    if request.node.get_closest_marker("optimized"):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
