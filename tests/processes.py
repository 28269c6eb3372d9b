"""Several processes on this machine that JAX joins, as it does under Open MPI, whose variables
these are.
"""

import socket


def environments(count: int) -> list[dict[str, str]]:
    """Returns the environment variables with which each process of a run on this machine joins the
    others.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {
        "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://{address}",
        "JAX_COORDINATOR_ADDRESS": address,
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    return [common | {"OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(count)]
