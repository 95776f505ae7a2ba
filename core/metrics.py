"""What operators watch: Prometheus metrics, and the success rate of the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
GAUGES = {
    "num_requests_running": "Sequences that hold a slot",
    "num_requests_waiting": "Sequences that wait for a slot, swapped ones included",
    "slots_used": "Resident states of running sequences",
    "slots_cached": "Resident states kept for sessions; given up when a sequence needs the slot",
    "slots_total": "Resident states there is room for",
}


class Metrics:
    """The server's own metrics, in a registry of its own (plugins add theirs by `register_metrics`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges = {name: Gauge(name, text, registry=self.registry) for name, text in GAUGES.items()}
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished rows")
        self.finished = Counter("requests_finished", "Finished sequences", ["reason"], registry=self.registry)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token of a request", SECONDS
        )
        self.engine_step = self._histogram("engine_step_seconds", "Duration of one engine step", STEP_SECONDS)
        self.outcomes = Outcomes()

    def watch(self, readings: dict[str, Callable[[], float]]) -> None:
        """Give each gauge the function that reads it."""
        for name, read in readings.items():
            self._gauges[name].set_function(read)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)


class Outcomes:
    """Successes and failures of the last 60 seconds (service_rules.md: 4xx count as neither)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, window: float = 60.0) -> None:
        self._clock = clock
        self._window = window
        self._seen: deque[tuple[float, bool]] = deque(maxlen=100_000)

    def add(self, success: bool) -> None:
        self._seen.append((self._clock(), success))

    def rate(self) -> float | None:
        """Share of successes, 0 to 1; None when nothing ended in the window."""
        limit = self._clock() - self._window
        while self._seen and self._seen[0][0] < limit:
            self._seen.popleft()
        if not self._seen:
            return None
        return sum(success for _, success in self._seen) / len(self._seen)
