"""Connections between the monitors of a run of several processes: who is alive, and how the run ends.

The monitor of process 0, called the root, has a connection to each of the others. Both sides send a message every
quarter of `mesh.heartbeat_seconds`. A connection that closes without a goodbye, or is silent for too long, means that
the process behind it is dead. The root decides how the run ends, and tells all others, so that they agree.
"""

import contextlib
import dataclasses
import json
import selectors
import socket
import time
from typing import Any

from train.lifecycle.errors import RESTART

BEATS_PER_TIMEOUT = 4
CONNECT_SECONDS = 3.0  # the root waits this long for others to connect before it tells them that the run ends


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of the run.

    Attributes:
      rank: Its index among the processes.
      host: Name of its machine.
      pid: Process id of its monitor.
      addresses: Addresses of its machine, each of which others may be able to connect to.
      port: Port that its monitor listens on.
      token: Random text that the root expects of those that connect.
    """

    rank: int
    host: str
    pid: int
    addresses: list[str]
    port: int
    token: str

    def __str__(self) -> str:
        return f"process {self.rank} (pid {self.pid} on {self.host})"


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why the run ends before all of its processes are done.

    Attributes:
      rank: The process that it began with.
      code: Exit code of that process.
      others: Exit code of the other processes.
      text: What is printed.
      for_all: Whether all processes print it, and not only the one that it began with.
    """

    rank: int
    code: int
    others: int
    text: str
    for_all: bool


class Peers:
    """The connections of one monitor. `poll` returns an `Ending` once there is one."""

    def __init__(self, members: list[Member], rank: int, listener: socket.socket, timeout: float):
        """Connects to the root, or lets the others connect.

        Raises:
          OSError: The root cannot be reached.
        """
        self._members, self._rank, self._timeout = members, rank, timeout
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._connections: dict[socket.socket, _Connection] = {}
        self._expected = set(range(1, len(members))) if rank == 0 else set()  # those that have not connected yet
        self._joined_at = self._beat_at = time.monotonic()
        self._dead: Ending | None = None
        if rank == 0:
            self._selector.register(listener, selectors.EVENT_READ)
        else:
            root = self._add(_connect(members[0], timeout), 0)
            root.send({"hello": rank, "token": members[0].token})

    def poll(self, seconds: float) -> Ending | None:
        """Waits up to `seconds` for news, and returns how the run ends if that is decided."""
        ending = self._select(seconds)
        self._beat()
        ending = ending or self._find_silent()
        return self._decide(ending) if ending else None

    def end(self, ending: Ending) -> Ending:
        """Tells the others that the run ends, and returns how: the root's decision, if there was one before."""
        return self._decide(ending)

    def goodbye(self) -> None:
        """Tells the others that this process is done, so that the end of its connections means nothing."""
        self._await_others()
        for connection in list(self._connections.values()):
            connection.send({"goodbye": True})
        self.close()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._remove(connection)
        self._selector.close()
        self._listener.close()

    def _decide(self, ending: Ending) -> Ending:
        """Makes an ending that of the whole run: the root tells the others, and the others ask the root."""
        if self._rank == 0:
            self._await_others()
            for connection in list(self._connections.values()):
                connection.send({"ending": dataclasses.asdict(ending)})
            return ending
        (root,) = self._connections.values() or (None,)
        if root is None or ending.rank == 0:  # there is no root to ask
            return ending
        root.send({"ended": dataclasses.asdict(ending)})
        until = time.monotonic() + self._timeout
        while time.monotonic() < until and self._connections:
            for _ in self._selector.select(0.2):
                decided = self._receive(root)
                if decided:
                    return decided
        return ending

    def _await_others(self) -> None:
        """Lets the others connect to the root, which would otherwise seem dead to those that were late."""
        until = time.monotonic() + CONNECT_SECONDS
        while self._expected and time.monotonic() < until:
            self._select(0.1)

    def _select(self, seconds: float) -> Ending | None:
        """Waits up to `seconds` for messages and connections, and returns the first ending among the messages."""
        ending = None
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._add(self._listener.accept()[0], None)
            else:
                ending = ending or self._receive(self._connections[key.fileobj])  # type: ignore[index]
        return ending

    def _receive(self, connection: "_Connection") -> Ending | None:
        messages = connection.receive()
        if messages is None:
            self._remove(connection)
            if connection.rank is None or connection.said_goodbye:
                return None
            return self._death(connection.rank, "is gone")
        for message in messages:
            if "hello" in message and message.get("token") == self._members[0].token:
                connection.rank = int(message["hello"])
                self._expected.discard(connection.rank)
            elif connection.rank is None:  # not a process of this run
                self._remove(connection)
                return None
            connection.said_goodbye |= "goodbye" in message
            for kind in ("ended", "ending"):
                if kind in message:
                    return Ending(**message[kind])
        return None

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._timeout / BEATS_PER_TIMEOUT:
            self._beat_at = now
            for connection in list(self._connections.values()):
                connection.send({"beat": True})

    def _find_silent(self) -> Ending | None:
        now = time.monotonic()
        for connection in self._connections.values():
            if connection.rank is not None and not connection.said_goodbye:
                silent = now - connection.heard_at
                if silent > self._timeout:
                    return self._death(connection.rank, f"has been silent for {silent:.0f} s")
        if self._expected and now - self._joined_at > self._timeout:
            return self._death(min(self._expected), "did not connect")
        return None

    def _death(self, rank: int, what: str) -> Ending:
        return death(self._members[rank], what)

    def _add(self, stream: socket.socket, rank: int | None) -> "_Connection":
        connection = _Connection(stream, rank)
        self._connections[stream] = connection
        self._selector.register(stream, selectors.EVENT_READ)
        return connection

    def _remove(self, connection: "_Connection") -> None:
        self._selector.unregister(connection.stream)
        del self._connections[connection.stream]
        connection.stream.close()


def death(member: Member, what: str) -> Ending:
    """Makes the ending of a run one of whose processes died."""
    text = (
        f"{member} {what}, so all processes of the run end; starting all of them again continues from the newest "
        "checkpoint"
    )
    return Ending(member.rank, RESTART, RESTART, text, for_all=True)


class _Connection:
    """A stream of JSON lines. Sending never waits and never fails: a dead partner is noticed by its silence."""

    def __init__(self, stream: socket.socket, rank: int | None):
        stream.setblocking(False)
        self.stream, self.rank = stream, rank
        self.said_goodbye = False
        self.heard_at = time.monotonic()
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.stream.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the messages that have arrived, or None if the connection is closed."""
        try:
            content = self.stream.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not content:
            return None
        self.heard_at = time.monotonic()
        *lines, self._received = (self._received + content).split(b"\n")
        try:
            return [message for line in lines if isinstance(message := json.loads(line), dict)]
        except ValueError:  # not a process of this run
            return None


def _connect(root: Member, timeout: float) -> socket.socket:
    """Connects to the first address of the root that answers."""
    errors = []
    for address in root.addresses:
        try:
            return socket.create_connection((address, root.port), timeout=timeout)
        except OSError as error:
            errors.append(f"{address}: {error.strerror or error}")
    raise OSError(f"{root} cannot be reached on port {root.port} ({'; '.join(errors)})")
