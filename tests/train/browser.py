"""Drives a real, headless Chromium through chromedriver's HTTP interface, for tests of HTML pages."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, port: int, profile: Path):
        self._server = f"http://127.0.0.1:{port}"
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        session = self._call("POST", "/session", wanted)
        self._session = f"/session/{session['sessionId']}"

    def open(self, page: Path, *, width: int, height: int = 900) -> None:
        self._call("POST", f"{self._session}/window/rect", {"width": width, "height": height})
        self._call("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})

    def evaluate(self, script: str) -> Any:
        """Runs a function body in the page and returns its result."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def move_pointer(self, x: float, y: float) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._call("POST", f"{self._session}/actions", {"actions": [mouse]})

    def save_screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        self._call("DELETE", self._session)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, content, {"Content-Type": "application/json"})
        request.method = method
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]


def is_installed() -> bool:
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with a new profile in the given folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_port(port)
        browser = Browser(port, profile)
        yield browser
        browser.close()
    finally:
        driver.terminate()
        driver.wait()


def _await_port(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("chromedriver does not answer")
