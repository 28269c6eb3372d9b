"""One of two processes that ask which kernels to trust on a described pod; prints what it takes and
what it logs.

The environment variable VERDICT is the verdict to store first, "" for none, LATE the seconds to
come late, if any, and LIMIT the seconds for which the processes wait for each other.
"""

import json
import logging
import os
import time

import jax

import flaxasync as fa
from flaxasync.ops import agreement, choose, trust

OP, ROWS, WIDTH = "all_gather_matmul", 256, 4096


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize()
    assert (jax.device_count(), jax.process_count()) == (8, 2)
    said = []
    logging.getLogger("flaxasync").addHandler(logging.Handler())
    logging.getLogger("flaxasync").handlers[0].emit = lambda record: said.append(
        record.getMessage()
    )
    if verdict := os.environ["VERDICT"]:
        assert trust.record(trust.Machine.here("v5e"), {f"{OP}/fused/3+": {"a case": verdict}})
    time.sleep(float(os.environ.get("LATE", "0")))
    agreement.LIMIT = int(os.environ.get("LIMIT", "60"))
    with (
        jax.set_mesh(fa.check.topology_mesh("v5e:4x4", (16,), ("model",))),
        trust.trusting("verified"),
    ):
        taken = [
            choose.decide(OP, None, shapes=[(ROWS, WIDTH), (WIDTH, WIDTH)], ring=16).backend
            for _ in range(2)
        ]
    print(json.dumps([taken, said]))


if __name__ == "__main__":
    main()
