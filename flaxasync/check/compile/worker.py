"""The process in which libtpu, or XLA for GPUs, compiles. It reads requests from stdin and writes
answers to stdout, both as pickles.

A compiler may crash this process without harm to its parent. compile_for.py runs this file as a script,
by its path. It imports jax and never flaxasync, so that it starts fast.

The script uses three internals of jaxlib (the compile-only client, CompileOptions and DeviceList),
because only they can compile a lowered module in another process than the one that traced it.
"""

import os
import pickle
import queue
import sys
import threading
import traceback
from typing import Any


def compile_request(request: dict) -> dict:
    """Compiles one lowered module.

    The request has its "module" (MLIR bytecode), "options" (serialized CompileOptions), "topology"
    (the arguments that describe it), and "device_ids" in the order of the mesh. The answer has
    "text" (HLO), "memory" (bytes by kind) and "cost", which is {} for GPUs.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    from jaxlib.mlir import ir

    described: Any = topologies.get_topology_desc(**request["topology"])
    devices = {device.id: device for device in described.devices}
    chosen = tuple(devices[i] for i in request["device_ids"])
    with mlir.make_ir_context():
        module = ir.Module.parse(request["module"])
        executable = chosen[0].client.compile(
            module,
            executable_devices=xla_client.DeviceList(chosen),
            compile_options=xla_client.CompileOptions.ParseFromString(request["options"]),
        )
    stats = executable.get_compiled_memory_stats()
    cost: dict = {}
    if request["topology"]["platform"] == "tpu":  # the compiler for GPUs makes no analysis of costs
        cost = dict(executable.cost_analysis())
    return {
        "text": "\n\n".join(m.to_string() for m in executable.hlo_modules()),
        "memory": {
            name: getattr(stats, name)
            for name in dir(stats)
            if name.endswith(("_in_bytes", "_allocation_bytes"))
        },
        "cost": cost,
    }


def read_requests(requests: queue.SimpleQueue) -> None:
    """Hands on the requests, and ends the process when its parent closes the stream or is gone,
    also in the middle of a compilation, which can take minutes.
    """
    while True:
        try:
            requests.put(pickle.load(sys.stdin.buffer))
        except EOFError:
            os._exit(0)
        except BaseException:  # of a parent that was killed while it wrote
            traceback.print_exc()
            os._exit(1)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that nothing that a compiler prints on stdout is taken for an answer
    requests = queue.SimpleQueue[dict]()
    threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
    while True:
        request = requests.get()
        try:
            answer: dict = {"ok": compile_request(request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
