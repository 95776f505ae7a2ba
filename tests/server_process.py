"""A real server in a process of its own, on a free port of 127.0.0.1, for tests over real sockets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

COMMAND = str(Path(sys.executable).with_name("rwkv-lightning"))
START_SECONDS = 120.0  # the first start builds the kernels


class ServerProcess:
    """`with ServerProcess("--max-batch", "8") as server:` runs `rwkv-lightning serve` with these options."""

    def __init__(self, *options: str, env: dict[str, str] | None = None) -> None:
        self.options = options
        self.env = {**os.environ, "OMP_NUM_THREADS": "2", **(env or {})}
        self.url = ""

    def __enter__(self) -> ServerProcess:
        self._log = tempfile.NamedTemporaryFile("w+b", suffix=".log")
        self._folder = tempfile.TemporaryDirectory()  # a state store of its own, unless the options name one
        database = f"{self._folder.name}/states.db"
        general = ["--host", "127.0.0.1", "--port", "0", "--state-db", database]
        command = [COMMAND, "serve", *general, *self.options]
        self.process = subprocess.Popen(command, env=self.env, stdout=self._log, stderr=self._log)
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self.__exit__()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()
        self._folder.cleanup()

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r"serves at (http://\S+)", self.log())
            if found and self._answers(found.group(1)):
                return found.group(1)
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start: {self.log()}")

    def _answers(self, url: str) -> bool:
        try:
            return httpx.get(f"{url}/v1/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """What the server has printed so far."""
        return Path(self._log.name).read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self.process.pid

    # What tests ask of a server, in one place.

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.client.get("/metrics").text
        return sum(float(m) for m in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Until something that the server reports has come true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.client.get('/v1/health').text}"
            time.sleep(0.01)

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until no row runs or waits and every slot is free."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            names = ("num_requests_running", "num_requests_waiting", "slots_used")
            if not any(self.metric(name) for name in names):
                return
            time.sleep(0.02)
        raise AssertionError(f"the server is not idle after {seconds} s: {self.client.get('/v1/health').text}")


def sse_events(response: httpx.Response) -> list[str]:
    """The data of a whole stream of server-sent events, comments left out."""
    events = [part for part in response.text.split("\n\n") if part and not part.startswith(":")]
    assert all(event.startswith("data: ") for event in events), events
    return [event.removeprefix("data: ") for event in events]
