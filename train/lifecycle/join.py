"""Tells the monitor of each process who the other processes are, once JAX's runtime has joined them."""

import contextlib
import json
import os
import platform
import secrets
import socket

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.lifecycle.monitor import Link
from train.lifecycle.peers import Member

_BYTES = 1024  # of the JSON of a member


def join(link: Link) -> None:
    """Exchanges addresses with all other processes and hands them to the monitor."""
    own = Member(jax.process_index(), platform.node(), os.getppid(), _addresses(), link.port, secrets.token_hex(8))
    content = np.zeros(_BYTES, np.uint8)
    encoded = np.frombuffer(json.dumps(vars(own)).encode(), np.uint8)
    content[: encoded.size] = encoded
    gathered = np.asarray(multihost_utils.process_allgather(content)).astype(np.uint8)
    members = [Member(**json.loads(bytes(row).rstrip(b"\0"))) for row in gathered]
    link.joined(members, own.rank)


def _addresses() -> list[str]:
    """Returns the addresses at which other machines, or at least this one, may reach this machine."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the interface that leads to other networks
            found.append(probe.getsockname()[0])
        except OSError:  # there is no such network
            pass
    with contextlib.suppress(OSError):
        found += [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys([*map(str, found), "127.0.0.1"]))
