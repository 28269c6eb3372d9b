"""`compile_for`, which compiles a function for TPUs or GPUs on a machine without any.

The caller's process traces and lowers the function, and a child process compiles it, with the flags
that the variable LIBTPU_INIT_ARGS (for GPUs: XLA_FLAGS) has then. libtpu can end the process in
which it compiles: with a segmentation fault on some kernels, and with an arithmetic fault on some
names. The child stays for the next call, of this thread or of another. A new one is started if
none is idle, if it has died, or if the flags are others. Calls that ask for dumps have a child of
their own, because libtpu reads the flags for dumps only when it is loaded. The program is that of
jax.jit on the topology.
"""

import atexit
import contextlib
import io
import os
import pathlib
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from flaxasync.check.compile import worker
from flaxasync.check.compile.function_call import FunctionCall
from flaxasync.check.compile.gpu_topologies import (
    VARIABLE,
    GpuTopology,
    cudnn_of,
    options_of_gpus,
)
from flaxasync.check.compile.program import CompiledProgram, check_memory, hbm_error
from flaxasync.check.compile.topologies import (
    ENVIRONMENT,
    busy_message,
    place_arguments,
    places_of,
    topology_arguments,
    topology_devices,
)
from flaxasync.check.progress import progress
from flaxasync.check.tested_libtpu import installed_libtpu

# the environment variable of each compiler's flags
FLAGS = {"TPU": "LIBTPU_INIT_ARGS", "GPU": VARIABLE}
# an 8B training step takes a minute to compile, so ten minutes mean that the compiler hangs
COMPILE_SECONDS = 600

# The custom call of jax.experimental.custom_partitioning.
_PARTITIONED_HERE = b"CustomSPMDPartitioning"

# Compiler options for callers that read the HLO only: loops in the code of fusions are not
# unrolled. 55 small programs took 24 s of processor time instead of 63; large matmuls gain little.
# The HLO, the cost and the memory are the same, except for the scratch bytes that a fusion is said
# to use and the bytes of the code, which is smaller and slower.
HLO_ONLY = types.MappingProxyType({"xla_tpu_enable_emitter_rolling": "true"})
# The compiler passes whose bundles are dumped. All passes would be ten times as much text, and take
# seconds a kernel.
_DUMP_PASSES = "(final_bundles|original)"
_LOWERING = threading.RLock()


def compile_for(
    topology: str,
    fn: Callable,
    *args: Any,
    keep_dumps: bool | str | os.PathLike = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = COMPILE_SECONDS,
    **kwargs: Any,
) -> CompiledProgram:
    """Compiles a function for a topology of TPUs or GPUs in a child process, without any of them.

    Args:
      topology: The chip and its grid: "v5e:2x4", "v5p:2x2x2", ...; "v5e:2x4*2" for two slices. Or
        GPUs: "h100:8", "h100:2x8" for two hosts; also "a100", "h200" and "b200".
      fn: A function of `jax.jit` or `nnx.jit`, or one of global arrays; also `functools.partial` of
        these, a method, or a module that is called.
      *args: Arrays or jax.ShapeDtypeStruct, or pytrees of them; modules and optimizers of Flax;
        static arguments of a jitted function. Shardings on a `topology_mesh` are taken as they are.
        Shardings on another mesh of the same size (8 CPU devices, for example) are moved to a mesh
        of the topology with the same axes, which is then the ambient mesh while `fn` is traced.
        Shardings on an AbstractMesh (from `nnx.eval_shape`) are moved to the mesh that has its
        axes. If no argument has a sharding and no mesh is ambient, the function is compiled for one
        chip.
      keep_dumps: Whether to also write libtpu's final bundles: a folder for them, or True for a new
        temporary folder. The folder is `.dumps` of the result, and the caller deletes it. There are
        none of GPUs.
      compiler_options: The compiler's own options, as for `Lowered.compile`. `HLO_ONLY` compiles
        sooner for TPUs where only the HLO is read. Products on GPUs are calls of cuBLAS, and no
        kernel is chosen by its time, unless options say otherwise.
      timeout: Seconds after which the child is ended.
      **kwargs: Arguments of the function by name. For one with a name of above, use
        `functools.partial`.

    Returns:
      The program: `.as_text()`, `.memory_analysis()`, `.bytes_by_kind`, `.cost_analysis()`,
        `.dumps`.

    Raises:
      TypeError: `fn` is no function, or has arguments that cannot be moved.
      ValueError: The topology is unknown, or does not have the size of the mesh, or the arguments
        lie on several meshes; or dumps of a GPU's program were asked for; or the function has a
        call of jax.experimental.custom_partitioning.
      ImportError: The compiler is not installed: libtpu, or JAX's wheels for GPUs.
      HbmError: The program does not fit into the memory of a device. This RuntimeError has
        `.needed` and `.available`.
      RuntimeError: The compiler refused the program, crashed (the message names the signal), or did
        not finish.
    """
    gpus: GpuTopology | None = None
    if isinstance(topology, str):
        gpus = GpuTopology.of(topology)
    if gpus is not None and keep_dumps:
        raise ValueError(
            f"keep_dumps asks for libtpu's bundles, which programs of {topology} do not have"
        )
    devices = topology_devices(topology)
    call, mesh = place_arguments(topology, devices, FunctionCall.of(fn, args, kwargs))
    with progress(f"tracing for {topology}"):
        lowered = _lower(call, mesh, gpus)
    options = dict(compiler_options or {})
    kind = "TPU"
    version = installed_libtpu()
    if gpus is not None:
        kind = "GPU"
        version = ""
        options = options_of_gpus(options)
    request = _request(topology, lowered, options)
    known = {d.id for d in devices}
    if len(request["device_ids"]) > len(devices) or not known.issuperset(request["device_ids"]):
        raise ValueError(
            f"the function was lowered for {len(request['device_ids'])} devices that are not those "
            f"of {topology}: make its mesh with topology_mesh({topology!r}, ...), or let it use "
            "the ambient mesh"
        )
    dumps = _folder_of(keep_dumps)
    with (
        progress(f"compiling for {topology}"),
        lent_process(kind, dumps=dumps is not None) as process,
    ):
        answer = process.compile(request, timeout, dumps)
    coords = places_of(devices)
    program = CompiledProgram(
        text=answer["text"],
        topology=topology,
        memory=answer["memory"],
        cost=answer["cost"],
        coords=tuple(coords[i] for i in request["device_ids"]),
        dumps=dumps,
        axes=_mesh_axes(call),
        libtpu=version,
    )
    if gpus is not None:
        check_memory(program, gpus.gpu)
    return program


def _lower(call: FunctionCall, mesh: Mesh | None, gpus: GpuTopology | None) -> Any:
    """Traces a call on a mesh, for GPUs as if cuDNN was installed.

    Threads do so in turns: together they would share one core, and the first compiler would begin
    later. `cudnn_of` replaces functions of JAX meanwhile.
    """
    with contextlib.ExitStack() as around:
        around.enter_context(_LOWERING)
        if mesh is not None:
            around.enter_context(jax.set_mesh(mesh))
        if gpus is not None:
            around.enter_context(cudnn_of(gpus.gpu))
        return call.lower()


def _folder_of(keep_dumps: bool | str | os.PathLike) -> pathlib.Path | None:
    """Returns the folder for dumps: a new one if it is not named, None if none are kept."""
    if not keep_dumps:
        return None
    if keep_dumps is True:
        return pathlib.Path(tempfile.mkdtemp(prefix="flaxasync-")).absolute()
    return pathlib.Path(keep_dumps).absolute()


class CompilerProcess:
    """A child process that compiles for one `kind`, "TPU" or "GPU". It dumps all programs or none,
    into a folder, from which `compile` moves them.
    """

    def __init__(self, kind: str = "TPU", *, dumps: bool = False):
        environment = ENVIRONMENT | os.environ | {"JAX_PLATFORMS": "cpu"}
        self.kind = kind
        self.flags = environment.get(FLAGS[kind], "")  # which a compiler reads when it is loaded
        self._dumps = tempfile.TemporaryDirectory(prefix="flaxasync-") if dumps else None
        if self._dumps is not None:
            flags = (
                f"--xla_jf_dump_to={self._dumps.name} --xla_jf_dump_llo_text=true "
                "--xla_jf_dump_hlo_text=true"
            )
            flags += f" --xla_jf_dump_llo_pass_label_regex={_DUMP_PASSES}"
            environment[FLAGS["TPU"]] = f"{self.flags} {flags}".strip()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
        self.process = subprocess.Popen(
            [sys.executable, worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )

    def compile(self, request: dict, timeout: float, folder: pathlib.Path | None = None) -> dict:
        """Compiles one program, within `timeout` seconds. Its dumps go into `folder`.

        Request and answer are those of `compile_request` of worker.py, and the errors are those of
        `compile_for`.
        """
        try:
            answer = self._answer(request, timeout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self.process.wait()
            if code < 0:
                death = f"died of {signal.Signals(-code).name}"
            else:
                death = f"ended with code {code}"
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            last_lines = "\n".join(line for line in lines if not line.startswith("http"))[-2000:]
            self.end()
            raise RuntimeError(
                f"the {self.kind} compiler {death}; its last lines:\n{last_lines}"
            ) from None
        finally:
            if self._dumps is not None and folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                for file in pathlib.Path(self._dumps.name).iterdir():
                    # replaces a file of that name, as libtpu would
                    shutil.move(file, folder / file.name)
        if (message := answer.get("error")) is not None:
            if "already in use" in message:
                refused = busy_message(message)
            else:
                refused = f"the {self.kind} compiler refused: {message}"
            raise hbm_error(message) or RuntimeError(refused)
        return answer["ok"]

    def _answer(self, request: dict, timeout: float) -> dict:
        stdin = self.process.stdin
        stdout = self.process.stdout
        assert stdin is not None
        assert stdout is not None
        pickle.dump(request, stdin)
        stdin.flush()
        if not select.select([stdout], [], [], timeout)[0]:
            self.end()
            raise RuntimeError(
                f"the {self.kind} compiler did not finish in {timeout} s and was ended; pass a longer "
                "timeout"
            )
        return pickle.load(stdout)

    def close(self) -> None:
        self.end()
        if self._dumps is not None:
            self._dumps.cleanup()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


# by what they compile for, and whether they dump
_idle: dict[tuple[str, bool], list[CompilerProcess]] = {}
# by the thread that has borrowed them
_lent: dict[CompilerProcess, int] = {}


@contextlib.contextmanager
def lent_process(kind: str = "TPU", *, dumps: bool = False) -> Iterator[CompilerProcess]:
    """Lends an idle process for "TPU" or "GPU" that dumps, or one that does not, to one thread.
    Starts one if there is none with the present flags.
    """
    idle = _idle.setdefault((kind, dumps), [])
    while True:
        try:
            process = idle.pop()
        except IndexError:
            process = CompilerProcess(kind, dumps=dumps)
            atexit.register(process.close)
        if process.process.poll() is None and process.flags == os.environ.get(FLAGS[kind], ""):
            break
        process.close()
    _lent[process] = threading.get_ident()
    try:
        yield process
    except Exception:  # the compiler refused, or died, which the loop above will find
        _take_back(process, idle)
        raise
    except BaseException:  # its answer may still come, and would be taken for the next one
        del _lent[process]
        process.close()
        raise
    _take_back(process, idle)


def _take_back(process: CompilerProcess, idle: list[CompilerProcess]) -> None:
    del _lent[process]
    idle.append(process)


class CompilerThreads:
    """Threads that call `compile_for`, each with a compiler process of its own at a time."""

    def __init__(self, count: int):
        self._threads: set[int] = set()
        self._pool = ThreadPoolExecutor(count, initializer=self._enter)
        self._futures: list[Future] = []

    def submit[T](self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        future = self._pool.submit(function, *arguments)
        self._futures.append(future)
        return future

    def end(self) -> None:
        """Ends what is still being compiled, so that a caller that is interrupted need not wait for
        a compiler.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self._futures):
            for process, thread in list(_lent.items()):
                if thread in self._threads:
                    process.process.kill()  # and the thread gets a RuntimeError
            time.sleep(0.1)

    def _enter(self) -> None:
        self._threads.add(threading.get_ident())


def _mesh_axes(call: FunctionCall) -> dict[str, int]:
    """Returns the sizes of the mesh axes of a function's arguments, or else those of the ambient
    mesh, by name.
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in call.arrays)
    meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    return dict((meshes[0] if meshes else jax.sharding.get_mesh()).shape)


def _request(topology: str, lowered: Any, compiler_options: dict) -> dict:
    """Packs a lowered function and its options for the worker, from private attributes: JAX has no
    public way.
    """
    from jax._src.interpreters import pxla

    lowering = lowered._lowering
    facts = lowering.compile_args
    devices = tuple(lowering._device_list)
    to_inputs, to_outputs = pxla.get_prop_to_input_output(
        facts["in_shardings"], facts["out_shardings"], 0
    )
    options = dict(lowering._compiler_options_kvs) | compiler_options
    module = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(module)
    if _PARTITIONED_HERE in module.getvalue():
        raise ValueError(
            "the function has a call that a Python function of this process partitions, "
            "jax.experimental.custom_partitioning, as jax.nn.dot_product_attention with "
            "implementation='cudnn' has; another process cannot compile it: call it inside "
            "jax.shard_map"
        )
    compile_options = pxla.create_compile_options(
        lowered.compiler_ir("stablehlo"),
        facts["tuple_args"],
        to_inputs,
        to_outputs,
        facts["backend"],
        np.array(devices, dtype=object),
        options,
    )
    return {
        "topology": topology_arguments(topology),
        "module": module.getvalue(),
        "options": compile_options.SerializeAsString(),
        "device_ids": [d.id for d in devices],
    }
