"""A server in a thread of the test process, on a real socket: starts in a fraction of a process's time."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import uvicorn

from rwkv_lightning.core.app import build_app
from rwkv_lightning.core.config import load_settings
from rwkv_lightning.core.server import Server, bind, build_context
from server_process import ServerProcess

OWN = {"host": "127.0.0.1", "port": 0, "drain_timeout": 1.0, "state_store": "none"}


class ServerThread(ServerProcess):
    """`with ServerThread(max_batch=8) as server:` serves with these settings; `context` holds the server's parts."""

    def __init__(self, **settings: Any) -> None:
        self.settings = load_settings({**OWN, **settings})

    def __enter__(self) -> ServerThread:
        self.context = build_context(self.settings)
        listener = bind(self.settings.host, self.settings.port)
        config = uvicorn.Config(build_app(self.context), log_config=None, timeout_graceful_shutdown=5)
        self.server = Server(config, self.context)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60)
        return self

    def __exit__(self, *exc: Any) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server did not stop"
