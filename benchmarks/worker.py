"""A contender in a process of its own, pinned to as many processors as it has threads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

START_SECONDS = 900.0  # a first start builds kernels and converts the checkpoint
CALL_SECONDS = 900.0


class WorkerFailed(RuntimeError):
    """The process ended, did not answer, or its method raised; the message says which."""


class Worker:
    """Args: make: called in the process, with `arguments`; must be importable. Its result's methods are callable."""

    def __init__(self, make: Callable[..., Any], threads: int, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_host, args=(end, threads, make, arguments), daemon=False)
        with _environment(OMP_NUM_THREADS=str(threads)):
            self._process.start()
        end.close()
        self._answer(START_SECONDS)

    def call(self, method: str, *arguments: object) -> Any:
        """The method's result. Raises WorkerFailed."""
        self._pipe.send((method, arguments))
        return self._answer(CALL_SECONDS)

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise WorkerFailed(f"no answer within {seconds:g} s")
            good, value = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise WorkerFailed(f"the process ended with code {self._process.exitcode}") from None
        if not good:
            raise WorkerFailed(value)
        return value


class _environment:
    """Variables that a process started in the block inherits."""

    def __init__(self, **variables: str) -> None:
        self._new, self._old = variables, {name: os.environ.get(name) for name in variables}

    def __enter__(self) -> None:
        os.environ.update(self._new)

    def __exit__(self, *exc: object) -> None:
        for name, value in self._old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _host(pipe: Connection, threads: int, make: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    """The process: make the contender, then answer calls until told to end."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    try:
        hosted = make(*arguments)
    except Exception as error:
        pipe.send((False, _told(error)))
        return
    pipe.send((True, None))
    try:
        with suppress(EOFError, BrokenPipeError):  # the comparison was stopped: there is nobody to tell
            _serve(pipe, hosted)
    finally:
        if hasattr(hosted, "close"):
            hosted.close()


def _serve(pipe: Connection, hosted: Any) -> None:
    while (message := pipe.recv()) is not None:
        method, values = message
        try:
            answer = (True, getattr(hosted, method)(*values))
        except Exception as error:
            answer = (False, _told(error))
        pipe.send(answer)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
