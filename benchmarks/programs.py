"""Programs for chips that the machine need not have: their arguments, their compilation and their
simulation.
"""

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync import check
from flaxasync.check.compile.compile_for import FLAGS
from flaxasync.check.compile.topologies import topology_arguments
from flaxasync.check.player import Result, play_dump
from flaxasync.check.player.errors import UnknownOperationError
from flaxasync.check.player.kernel_times import simulator
from flaxasync.check.player.product_times import product_times
from flaxasync.check.tested_libtpu import installed_libtpu

# a large program takes two minutes on an idle machine, and much longer on a busy one
COMPILE_SECONDS = 7200
# opcodes that do not change an array
HANDED_ON = ("bitcast", "get-tuple-element", "copy-start", "copy-done")
# the simulator can execute these collectives
SYNCHRONOUS = {"xla_tpu_enable_async_collective_fusion": "false"}


def array(
    shape: tuple[int, ...], mesh: Mesh, spec: P, dtype: Any = jnp.bfloat16
) -> jax.ShapeDtypeStruct:
    """Describes an argument of a program: its global shape, and how it is sharded."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def split_layer(make: Callable[[], nnx.Module], mesh: Mesh, dtype: Any = None) -> tuple[Any, Any]:
    """Returns the structure of a layer, and its parameters without values, sharded as the layer
    asks.

    The mesh is the ambient one. A dtype is that of all parameters, in place of those that the layer
    gives them.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    specs = nnx.get_partition_spec(state)
    return graph, jax.tree.map(
        lambda leaf, spec: array(leaf.shape, mesh, spec, dtype or leaf.dtype), state, specs
    )


def play_program(
    topology: str, fn: Callable, *arguments: Any, compiler_options: Mapping[str, Any] | None = None
) -> tuple[Result, check.CompiledProgram]:
    """Compiles and simulates a jitted function. Returns the result, and the compiled program."""
    with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder:
        program = check.compile_for(
            topology,
            fn,
            *arguments,
            keep_dumps=folder,
            compiler_options=compiler_options,
            timeout=COMPILE_SECONDS,
        )
        return play_dump(folder, topology=topology, coords=program.coords), program


def play_or_synchronize(
    topology: str, fn: Callable, *arguments: Any
) -> tuple[Result, check.CompiledProgram, str]:
    """Simulates a program as XLA compiles it by default or, if that is refused, with synchronous
    collectives.

    Returns the result, the compiled program, and a mark for its row of a table: "*" if its
    collectives are synchronous.
    """
    try:
        return *play_program(topology, fn, *arguments), ""
    except UnknownOperationError:
        return *play_program(topology, fn, *arguments, compiler_options=SYNCHRONOUS), "*"


def seconds_without_exit_copies(result: Result, program: check.CompiledProgram) -> float:
    """Returns the seconds of a played program without the copies that XLA adds where a kernel ends
    the program.
    """
    copies = exit_copies(check.parse(program.text))
    return result.seconds - sum(p.seconds for p in result.slowest.phases if p.name in copies)


def exit_copies(module: check.HloModule) -> set[str]:
    """Returns the copies that hand a kernel's results to the caller. Copies of what XLA computed
    are work.
    """
    by_name = {i.name: i for i in module.entry.instructions}

    def of_kernel(name: str) -> bool:
        made = by_name[name]
        return made.opcode == "custom-call" or (
            made.opcode in HANDED_ON and of_kernel(made.operands[0])
        )

    root = module.entry.root
    assert root is not None
    results = root.operands if root.opcode == "tuple" else (root.name,)
    copies = [name for name in results if name in by_name and by_name[name].opcode == "copy"]
    return {name for name in copies if of_kernel(by_name[name].operands[0])}


def kept(folder: pathlib.Path, facts: object, make: Callable[[], Any]) -> Any:
    """Returns what `make` returns, in JSON's types, or what an earlier call with the same facts
    left in the folder.

    Facts are what the result depends on; those of the simulator are added to them.
    """
    everything = repr((facts, simulator()))
    file = folder / f"{hashlib.sha256(everything.encode()).hexdigest()}.json"
    if not file.exists():
        content = json.dumps(make())
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return json.loads(file.read_text())


def kept_seconds(
    folder: pathlib.Path, topology: str, mesh: Mesh, fn: Any, *arguments: Any
) -> float:
    """Plays a jitted function with synchronous collectives. Returns its seconds without the copies
    of its results, or those that an earlier call left in the folder.
    """

    def simulate() -> float:
        played = play_program(topology, fn, *arguments, compiler_options=SYNCHRONOUS)
        return seconds_without_exit_copies(*played)

    facts = (topology, str(mesh.devices.tolist()), lowered(fn, *arguments), SYNCHRONOUS)
    return kept(folder, facts, simulate)


def lowered(fn: Any, *arguments: Any) -> str:
    """Returns the text of a lowered function, which does not say at which lines of the sources its
    kernels were written.
    """
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        return fn.lower(*arguments).as_text()
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def with_gradients(fn: Callable) -> Callable:
    """Makes the function of the arguments and dy that returns y, and the gradient of each
    argument.
    """

    def forward_and_backward(*arguments: Any) -> tuple[Any, ...]:
        *inputs, dy = arguments
        y, backward = jax.vjp(fn, *inputs)
        return y, *backward(dy)

    return forward_and_backward


def compile_once(
    folder: pathlib.Path, name: str, topology: str, fn: Any, *arguments: Any
) -> check.CompiledProgram:
    """Compiles a jitted function for its HLO, or reads what an earlier call left in the folder.

    The file is that of the lowered function, the flags of libtpu in the environment, and the
    compiler. Code that moves but computes the same finds its file again.
    """

    def make() -> check.CompiledProgram:
        options = check.HLO_ONLY
        return check.compile_for(
            topology, fn, *arguments, timeout=COMPILE_SECONDS, compiler_options=options
        )

    return _load_or_make(_file_of(folder, name, topology, fn, arguments), make)


def compile_with_products(
    folder: pathlib.Path, name: str, topology: str, fn: Any, *arguments: Any
) -> tuple[check.CompiledProgram, dict[str, float]]:
    """Compiles a jitted function, and simulates the bundles of its matrix products, or reads what
    an earlier call left in the folder. The file is that of `compile_once`, and of the simulator.

    Returns the program, and the seconds of its products by name. What was not simulated is printed.
    """

    def make() -> tuple[check.CompiledProgram, dict[str, float]]:
        with tempfile.TemporaryDirectory(prefix="flaxasync-") as dumps:
            program = check.compile_for(
                topology, fn, *arguments, timeout=COMPILE_SECONDS, keep_dumps=dumps
            )
            module = check.parse(program.text)
            times, lines = product_times(program, module, pathlib.Path(dumps))
        for line in lines:
            print(line, file=sys.stderr)
        return dataclasses.replace(program, dumps=None), times

    file = _file_of(folder, f"{name} products", topology, fn, arguments, simulator())
    return _load_or_make(file, make)


def _file_of(
    folder: pathlib.Path, name: str, topology: str, fn: Any, arguments: tuple, also: object = None
) -> pathlib.Path:
    """Returns the file of what depends on a function, how it is compiled, and something else."""
    versions = [importlib.metadata.version("jaxlib"), installed_libtpu()]
    text = lowered(fn, *arguments)
    described = topology_arguments(topology)
    # the text names devices by their places in the mesh
    first = jax.tree.leaves(arguments)[0].sharding
    order = [device.id for device in first.mesh.devices.flat]
    content = repr((described, order, text, os.environ.get(FLAGS["TPU"]), versions, also))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    # names of files have 255 letters
    return folder / f"{re.sub(r'[^a-zA-Z0-9]+', '-', name)[:200]}-{digest}.pickle.gz"


def _load_or_make[T](file: pathlib.Path, make: Callable[[], T]) -> T:
    """Returns what is in a file, which is made first if it is not there."""
    if not file.exists():
        content = gzip.compress(pickle.dumps(make()))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return pickle.loads(gzip.decompress(file.read_bytes()))
