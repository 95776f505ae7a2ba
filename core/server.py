"""`serve`: load the model, build the application, say where it is, and run it until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console

from rwkv_lightning.core.app import build_app
from rwkv_lightning.core.collector import settle
from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.interfaces import ServerContext
from rwkv_lightning.core.metrics import Metrics
from rwkv_lightning.core.models import ModelManager

if TYPE_CHECKING:
    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.engine import RequestSummary
    from rwkv_lightning.core.models import LoadedModel

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.05
GOODBYE_SECONDS = 2  # for the last events of streams that were cut


def serve(settings: Settings) -> None:
    """Run the server; returns after a clean shutdown. Raises StartError before the port is opened."""
    configure_logging(settings.log_level)
    set_threads(settings.threads)
    bind(settings.host, settings.port).close()  # before anything is loaded or opened
    context = build_context(settings)
    app = build_app(context)
    listener = bind(settings.host, settings.port)
    settle()
    print_banner(context, listener.getsockname()[1])
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout) + GOODBYE_SECONDS,
        timeout_keep_alive=75,
        backlog=4096,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # raised again after a shutdown that it began: exit 0
    Server(config, context).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn, whose shutdown drains: new work is refused at once, running work is cut after --drain-timeout."""

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engines = [model.engine for model in self._context.models.all()]
        loop = asyncio.get_running_loop()
        for engine in engines:
            engine.drain()
            loop.call_later(self._context.settings.drain_timeout, engine.cut)
        latest = loop.time() + self._context.settings.drain_timeout + GOODBYE_SECONDS  # a step may hang
        while any(engine.busy for engine in engines) and loop.time() < latest and not self.force_exit:
            await asyncio.sleep(DRAIN_POLL_SECONDS)  # the port stays open meanwhile, so that new requests are told why
        await super().shutdown(sockets)


def build_context(settings: Settings) -> ServerContext:
    """Load plugins and the model. Raises StartError."""
    host = PluginHost(settings)
    metrics = Metrics()
    models = ModelManager(settings, host, metrics)

    def on_finished(summary: RequestSummary) -> None:
        log.debug("finished %s", summary)
        host.request_finished(summary)

    models.load(on_finished)
    return ServerContext(settings, host, models, metrics)


def set_threads(count: int) -> None:
    """Threads of torch and of our kernels, which share its pool."""
    import torch

    torch.set_num_threads(count)


def configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the banner says that and where it runs


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Raises StartError naming the address and the way out."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return listener
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
        ) from None


def print_banner(context: ServerContext, port: int) -> None:
    """Where the server is, what it serves, and a line to try."""
    settings, model = context.settings, context.models.default
    url = f"http://{reachable_host(settings.host)}:{port}"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold green]rwkv-lightning[/] serves at [bold]{url}[/]  (API reference: {url}/docs)")
    for name, value in banner_rows(model, settings):
        console.print(f"  [bold]{name:8}[/]  ", end="")
        console.print(value, markup=False)
    console.print(f"try it:\n{try_line(url, settings.password is not None)}", markup=False)


def banner_rows(model: LoadedModel, settings: Settings) -> list[tuple[str, str]]:
    state = model.model.state_nbytes()
    return [
        ("model", f"{model.name} ({model.path})"),
        ("engine", model.engine_name),
        ("device", f"{model.model.device}, {settings.threads} threads"),
        ("type", model.model.dtype),
        ("kernels", model.model.description),
        ("slots", f"{model.slots} x {state / 1e6:.2f} MB of state"),
        ("password", password_row(settings)),
    ]


def password_row(settings: Settings) -> str:
    """Whether clients need one, and who may do without it."""
    if settings.password:
        return "required"
    if settings.host in ("127.0.0.1", "::1", "localhost"):
        return "none (--password sets one)"
    return "none: whoever reaches this port may use it (--password sets one, --host 127.0.0.1 closes it to others)"


def try_line(url: str, password: bool) -> str:
    secret = ', "password": "..."' if password else ""
    prompt = "User: What is the capital of France?\\n\\nAssistant: <think>\\n</think>\\n"
    body = f'{{"contents": ["{prompt}"], "max_tokens": 40, "temperature": 0{secret}}}'
    return f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def reachable_host(host: str) -> str:
    """A host that works in a URL on this machine."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
