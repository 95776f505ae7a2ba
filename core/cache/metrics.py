"""What /metrics shows of the states: prefix look-ups, tiers, resumptions, refusals, the store's failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rwkv_lightning.core.cache.sessions import Level

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.states import ModelStates

TIERS = {Level.L1: "l1", Level.L2: "l2", Level.L3: "l3"}
REFUSALS = ("state_corrupt", "state_foreign", "state_version", "state_lost")


class StateMetrics(Collector):
    """Reads the counters of one model's states when they are asked for; asks neither device nor store."""

    def __init__(self, states: ModelStates) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        yield from self._prefixes()
        yield from self._sessions()
        cache = self._states.cache
        yield CounterMetricFamily("state_store_errors", "Calls of the state store that failed", cache.watch.errors)
        waiting = 0 if cache.writer is None else cache.writer.waiting
        yield GaugeMetricFamily("state_writes_waiting", "States that are not in the state store yet", waiting)

    def _prefixes(self) -> Iterator[Metric]:
        stats = self._states.prefixes.stats
        yield CounterMetricFamily("prefix_cache_queries", "Prompts looked up in the prefix cache", stats.queries)
        yield CounterMetricFamily("prefix_cache_hits", "Prompts whose beginning was there", stats.hits)
        yield CounterMetricFamily("prefix_cache_tokens_saved", "Prompt tokens not fed therefore", stats.tokens_saved)

    def _sessions(self) -> Iterator[Metric]:
        cache = self._states.cache
        with cache.lock:
            in_slots = len(cache.slots)
            sessions, prefixes = cache.host.tier.counts()
            nbytes = cache.host.nbytes
        held = GaugeMetricFamily("states_held", "States in a tier of memory", labels=("tier", "kind"))
        held.add_metric(("l1", "session"), in_slots)
        held.add_metric(("l2", "session"), sessions)
        held.add_metric(("l2", "prefix"), prefixes)
        yield held
        yield GaugeMetricFamily("states_memory_bytes", "Host memory that states take", nbytes)
        resumed = CounterMetricFamily("sessions_resumed", "Turns that went on from a state", labels=("tier",))
        for level, tier in TIERS.items():
            resumed.add_metric((tier,), cache.resumed[level])
        yield resumed
        copies = CounterMetricFamily(
            "state_copies", "States copied out of slots, in a step or beside it", labels=("where",)
        )
        copies.add_metric(("step",), cache.moves.copies["step"])
        copies.add_metric(("beside",), cache.moves.copies["beside"])
        yield copies
        refused = CounterMetricFamily("states_refused", "States that could not be used", labels=("code",))
        for code in REFUSALS:
            refused.add_metric((code,), cache.refused[code])
        yield refused
