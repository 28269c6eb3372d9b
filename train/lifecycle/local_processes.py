"""Starts several processes of a run here: `python train/lifecycle/local_processes.py 2 [CONFIG] [OPTIONS]`.

The processes find each other as they do under Open MPI, whose environment variables this program sets. Each of them has
`mesh.cpu_devices` simulated devices. It is meant for trying out on one machine what a cluster does; there, the cluster
starts the processes.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "run.py"


def environments(count: int) -> list[dict[str, str]]:
    """Returns the environment variables with which each process of a run joins the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {
        "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://{address}",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    return [common | {"OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(count)]


def main(arguments: Sequence[str]) -> int:
    """Runs the processes and returns the exit code of the first one."""
    if not arguments or not arguments[0].isdigit() or int(arguments[0]) < 1:
        print("error: the first argument must be the number of processes, at least 1", file=sys.stderr)
        return 2
    command = [sys.executable, str(SCRIPT), *arguments[1:], "--mesh.distributed", "True"]
    processes = [subprocess.Popen(command, env=os.environ | variables) for variables in environments(int(arguments[0]))]
    # The terminal sends Ctrl-C to every process itself; other signals reach only this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda received, _: processes[0].send_signal(received))
    codes = [process.wait() for process in processes]
    return codes[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
