"""`Engine`: what routes talk to. One thread owns the model; the event loop owns the requests' streams."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from rwkv_lightning.core.errors import (
    Draining,
    EngineDead,
    InternalError,
    OutOfMemory,
    Overloaded,
    RequestError,
)
from rwkv_lightning.core.request import Event, FinishReason, GenerationRequest
from rwkv_lightning.core.scheduler import RowParts, Scheduler
from rwkv_lightning.core.stream import RequestStream
from rwkv_lightning.core.text.output import StopSet, TextOutput

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.states import ModelStates
    from rwkv_lightning.core.interfaces import Sampler
    from rwkv_lightning.core.metrics import Metrics
    from rwkv_lightning.core.runner import ModelRunner
    from rwkv_lightning.core.sequence import Sampled, Step
    from rwkv_lightning.core.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)

NO_SLOT_SECONDS = 0.001  # pause when every slot is being copied out by the writer
Command = Callable[[], list[Event]]


@dataclass(slots=True)
class RequestSummary:
    """One finished request, for the log and the `request_finished` hook."""

    request_id: str
    rows: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    seconds_to_first_token: float | None = None
    reasons: list[FinishReason] = field(default_factory=list)


@dataclass(slots=True)
class _Ticket:
    stream: RequestStream
    summary: RequestSummary
    submitted: float


class Engine:
    """Runs one model's batch.

    Args:
        runner: the model over its resident states.
        scheduler: decides each step; touched by the engine thread only.
        samplers: registered samplers of this model, by name.
        vocabulary: for the text of generated tokens.
        max_waiting: rows that may wait for a slot before a request is refused with 503.
        states: sessions and prefixes; None for a model whose states nobody can keep.
        on_finished: called in the event loop once per finished request.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        samplers: Mapping[str, Sampler],
        vocabulary: Vocabulary,
        metrics: Metrics,
        *,
        max_waiting: int,
        states: ModelStates | None = None,
        on_finished: Callable[[RequestSummary], None] = lambda summary: None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.samplers = samplers
        self.vocabulary = vocabulary
        self.metrics = metrics
        self.max_waiting = max_waiting
        self.states = states
        self.on_finished = on_finished
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._tickets: dict[str, _Ticket] = {}
        self._rows_open = 0
        self._draining = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        metrics.watch(
            {
                "num_requests_running": lambda: scheduler.num_running,
                "num_requests_waiting": lambda: scheduler.num_waiting + scheduler.num_swapped + self._held,
                "slots_used": lambda: scheduler.num_running,
                "slots_cached": lambda: scheduler.ledger.used - scheduler.num_running,
                "slots_total": lambda: scheduler.ledger.total,
            }
        )

    # --- the event loop's side ---

    @property
    def _held(self) -> int:
        return 0 if self.states is None else len(self.states.coming)

    @property
    def alive(self) -> bool:
        """The engine thread runs and can serve."""
        return self._thread is not None and self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        """Start the engine thread; call it in the running event loop that will submit requests."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Accept no further requests; the present ones go on."""
        self._draining = True

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet."""
        return bool(self._tickets)

    def cut(self) -> None:
        """Refuse new requests and end the present ones, telling their clients why."""
        self.drain()
        error = Draining("the server is shutting down; the answer is cut here", retry_after=5.0)
        for request_id in list(self._tickets):
            self._inbox.put(partial(self._cut, request_id, error))

    async def stop(self) -> None:
        """Cut what still runs and end the engine thread."""
        self.cut()
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @contextmanager
    def submit(self, request: GenerationRequest) -> Iterator[RequestStream]:
        """Queue a request and give its stream; leaving the block aborts what is unfinished.

        Raises:
            Overloaded, Draining, EngineDead: the request was not accepted and costs nothing.
        """
        stream = self._accept(request)
        try:
            yield stream
        finally:
            if not stream.finished:
                self.abort(request.id)

    def abort(self, request_id: str) -> None:
        """End a request's unfinished rows before the next step; its terminal events still come."""
        self._inbox.put(lambda: self._abort(request_id))

    def _accept(self, request: GenerationRequest) -> RequestStream:
        self._check_admission(len(request.prompts))
        stream = RequestStream(len(request.prompts))
        summary = RequestSummary(request.id, len(request.prompts))
        self._tickets[request.id] = _Ticket(stream, summary, time.monotonic())
        self._rows_open += len(request.prompts)
        self._inbox.put(lambda: self._add(request))
        return stream

    def _check_admission(self, rows: int) -> None:
        if not self.alive:
            raise EngineDead("the engine has stopped; restart the server")
        if self._draining:
            raise Draining("the server is shutting down; try another one", retry_after=5.0)
        waiting = self._rows_open - self.scheduler.ledger.total
        if waiting + rows > self.max_waiting and self._rows_open:
            raise Overloaded(f"{max(waiting, 0)} rows are waiting already; try again soon", retry_after=1.0)

    def _deliver(self, events: list[Event]) -> None:
        self.metrics.generation_tokens.inc(sum(len(event.tokens) for event in events))
        for event in events:
            ticket = self._tickets.get(event.request_id)
            if ticket is not None:
                self._account(ticket, event)
                ticket.stream.push(event)

    def _account(self, ticket: _Ticket, event: Event) -> None:
        summary = ticket.summary
        if event.tokens and summary.seconds_to_first_token is None:
            summary.seconds_to_first_token = time.monotonic() - ticket.submitted
            self.metrics.time_to_first_token.observe(summary.seconds_to_first_token)
        if event.finish_reason is not None:
            self._account_row(ticket, event, event.finish_reason)

    def _account_row(self, ticket: _Ticket, event: Event, reason: FinishReason) -> None:
        summary = ticket.summary
        summary.reasons.append(reason)
        self._rows_open -= 1
        self.metrics.finished.labels(reason=reason.value).inc()
        if event.usage is not None:
            summary.prompt_tokens += event.usage.prompt_tokens
            summary.cached_tokens += event.usage.cached_tokens
            summary.completion_tokens += event.usage.completion_tokens
            self.metrics.prompt_tokens.inc(event.usage.prompt_tokens)
        if len(summary.reasons) == summary.rows:
            summary.seconds = time.monotonic() - ticket.submitted
            del self._tickets[summary.request_id]
            self.on_finished(summary)

    # --- the engine thread's side ---

    def _run(self) -> None:
        try:
            while self._drain_inbox():
                if not self.scheduler.idle:
                    self.step()
        except BaseException as error:  # a bug in the scheduler: nothing it holds can be trusted any more
            self._die(error)

    def step(self) -> None:
        """Schedule, run, update, emit."""
        begun = time.perf_counter()
        step = self.scheduler.schedule()
        if step is None:
            time.sleep(NO_SLOT_SECONDS)
            return
        self._emit(self._carry_out(step))
        self._add_released()
        self.metrics.engine_step.observe(time.perf_counter() - begun)

    def _add_released(self) -> None:
        """Requests that waited for another one to read their prompts' beginnings."""
        for request in self.states.coming.released() if self.states is not None else ():
            self._emit(self._add(request))

    def _carry_out(self, step: Step) -> list[Event]:
        try:
            samples = self._run_step(step)
        except (
            Exception
        ) as error:  # whatever a model or a plugin's sampler raises costs its step's rows, not the engine
            failure = describe_failure(error)
            if isinstance(failure, OutOfMemory):
                self.runner.release_memory()
            return self.scheduler.fail(step, failure)
        return self.scheduler.update(step, samples)

    def _run_step(self, step: Step) -> list[Sampled]:
        if self.states is None:
            return self.runner.run(step)
        self.states.before_run()
        samples = self.runner.run(step)
        self.states.after_run(step)
        return samples

    def _drain_inbox(self) -> bool:
        """Carry out what the event loop asked for; waits when there is nothing to run. False ends the thread."""
        if self.scheduler.idle and self._inbox.empty():
            self._check_integrity()
        while not self._inbox.empty() or self.scheduler.idle:
            command = self._inbox.get()
            if command is None:
                return False
            self._emit(command())
            self._add_released()
        return True

    def _check_integrity(self) -> None:
        """Raises LedgerMismatch unless every slot is free or the cache's; call when idle."""
        self.scheduler.check_integrity()
        if self.states is not None:
            self.states.cache.check_integrity(self.scheduler.ledger)

    def _add(self, request: GenerationRequest) -> list[Event]:
        if self.states is not None and self.states.hold(request):
            return []
        try:
            sequences = self.scheduler.add(request, self._open_rows(request))
            if self.states is not None:
                self.states.began(sequences)
        except Exception as error:
            failure = describe_failure(error)
            rows = range(len(request.prompts))
            return [Event(request.id, i, finish_reason=FinishReason.ERROR, error=failure) for i in rows]
        return []

    def _abort(self, request_id: str) -> list[Event]:
        held = self.states.coming.cancel(request_id) if self.states is not None else None
        if held is None:
            return self.scheduler.abort(request_id)
        return [Event(request_id, i, finish_reason=FinishReason.ABORT) for i in range(len(held.prompts))]

    def _cut(self, request_id: str, error: RequestError) -> list[Event]:
        return [replace(event, error=error) for event in self._abort(request_id)]

    def _open_rows(self, request: GenerationRequest) -> list[RowParts]:
        params = request.params
        sampler = self.samplers[params.sampler]
        stops = StopSet(params.stop)
        token_bytes = self.vocabulary.token_bytes
        return [
            RowParts(
                sampler,
                sampler.open(params.options, params.seed, row),
                TextOutput(token_bytes, stops),
                *(self.states.begin(request, prompt) if self.states else ()),
            )
            for row, prompt in enumerate(request.prompts)
        ]

    def _emit(self, events: list[Event]) -> None:
        if events and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _die(self, error: BaseException) -> None:
        self.failure = error
        log.critical("the engine has stopped: %s", error, exc_info=error)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._fail_all)

    def _fail_all(self) -> None:
        failure = EngineDead("the engine has stopped; restart the server")
        for request_id, ticket in list(self._tickets.items()):
            done = ticket.stream.rows_done
            rows = (row for row in range(ticket.summary.rows) if row not in done)
            self._deliver([Event(request_id, i, finish_reason=FinishReason.ERROR, error=failure) for i in rows])


def describe_failure(error: BaseException) -> RequestError:
    """What a client may know of a failed step; the log gets the traceback."""
    if isinstance(error, RequestError):
        return error
    log.error("a step failed: %s", error, exc_info=error)
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "can't allocate" in str(error):
        return OutOfMemory("out of memory while generating; send fewer rows at once or a smaller max_tokens")
    return InternalError("the step failed unexpectedly; the server's log says more")
