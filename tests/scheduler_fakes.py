"""A model for scheduler tests whose state is the tuple of tokens it has seen, so that any wrong state shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rwkv_lightning.core.ledger import SlotLedger
from rwkv_lightning.core.request import Event, FinishReason, GenerationRequest, SamplingParams
from rwkv_lightning.core.scheduler import RowParts, Sampled, Scheduler, Step
from rwkv_lightning.core.scheduler import Sequence as Row

END = 0
HELD = 3  # multiples of it give no text until the next token
STOP = 7
NAN = -1
UNDEFINED = ("undefined",)

History = tuple[object, ...]


def letter(token: int) -> str:
    return chr(ord("A") + token)


class FakeOutput:
    """One letter per token; some are held back for a token, and STOP is a stop text."""

    def __init__(self) -> None:
        self.stopped = False
        self._held = ""

    def push(self, token: int) -> str:
        assert not self.stopped, "a token after the stop"
        if token == STOP:
            self.stopped = True
            return self.flush()
        self._held += letter(token)
        return "" if token % HELD == 0 else self.flush()

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def parts(snapshot: History | None = None, cached: int = 0) -> RowParts:
    return RowParts(None, None, FakeOutput(), snapshot, cached)  # type: ignore[arg-type]


class FakeRunner:
    """Carries steps out on remembered token histories and checks each against what the row has to be fed."""

    def __init__(self, ledger: SlotLedger) -> None:
        self.ledger = ledger
        self.states: list[History] = [UNDEFINED] * ledger.total
        self.initial: dict[tuple[str, int], History] = {}  # by request and row
        self.fed = 0  # tokens in all
        self.steps_of: Counter[str] = Counter()  # decode steps by request

    def run(self, step: Step, pick: Callable[[Row], int]) -> list[Sampled]:
        self._move_states(step)
        seen = self._forward(step)
        self._fork(step)
        for row, index in step.samples:
            assert seen[index] == self._expected(row), "drawn from the logits of another history"
        assert len({id(row) for row, _ in step.samples}) == len(step.samples)
        return [Sampled(pick(row)) for row, _ in step.samples]

    def _move_states(self, step: Step) -> None:
        assert not {row for row, _ in step.saves} & {row for row, _ in step.restores}, "swapped out and in at once"
        for row, slot in step.saves:
            assert row.snapshot is None
            row.snapshot = self.states[slot]
        for slot in range(self.ledger.total):
            if self.ledger.owner(slot) is None:
                self.states[slot] = UNDEFINED
        for row, slot in step.restores:
            self.states[slot] = row.snapshot
        for slot in step.resets:
            self.states[slot] = ()

    def _forward(self, step: Step) -> list[History]:
        assert len({chunk.slot for chunk in step.chunks}) == len(step.chunks)
        seen = []
        for chunk in step.chunks:
            row = chunk.sequence
            assert chunk.tokens
            assert chunk.slot == row.slot
            assert self.ledger.owner(chunk.slot) is row
            after = self.states[chunk.slot] = self.states[chunk.slot] + chunk.tokens
            expected = self._expected(row)
            assert after == expected[: len(after)], "fed on the wrong state or out of order"
            assert chunk.wants_logits == (after == expected)
            self.fed += len(chunk.tokens)
            self.steps_of[row.request.id] += bool(row.generated)
            if chunk.wants_logits:
                seen.append(after)
        return seen

    def _fork(self, step: Step) -> None:
        for source, destination in step.forks:
            self.states[destination] = self.states[source]
        for source, followers in step.fork_saves:
            for row in followers:
                row.snapshot = self.states[source]

    def _expected(self, row: Row) -> History:
        """Everything a row's state must have seen before its next token is drawn."""
        return self.initial[row.request.id, row.row] + row.prompt[row.cached :] + tuple(row.generated)


class World:
    """A scheduler over a fake model, with every row's events collected and checked."""

    def __init__(self, slots: int, **options: int) -> None:
        self.ledger = SlotLedger(slots)
        self.scheduler = Scheduler(self.ledger, **options)  # type: ignore[arg-type]
        self.runner = FakeRunner(self.ledger)
        self.drawn: dict[tuple[str, int], list[int]] = {}
        self.told: dict[tuple[str, int], list[int]] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.ends: dict[tuple[str, int], Event] = {}
        self.events: list[Event] = []
        self.first_token: dict[str, int] = {}  # request -> step of its first token
        self.last_fed: dict[str, int] = {}
        self.now = 0

    def add(
        self,
        name: str,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int = 4,
        rows: Sequence[RowParts] | None = None,
        chunk_size: int = 1,
    ) -> None:
        params = SamplingParams("fake", None, max_tokens)
        request = GenerationRequest(name, list(prompts), params, chunk_size)
        rows = rows or [parts() for _ in prompts]
        self.scheduler.add(request, rows)
        for index, row in enumerate(rows):
            self.drawn[name, index] = []
            self.runner.initial[name, index] = row.snapshot or ()
        self.last_fed[name] = self.now

    def plan(self) -> Step | None:
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.now += 1
        return step

    def run(self, step: Step, pick: Callable[[Row], int] = lambda row: 1) -> list[Sampled]:
        """The model's part of a step."""
        samples = self.runner.run(step, pick)
        self.last_fed |= {chunk.sequence.request.id: self.now for chunk in step.chunks}
        return samples

    def update(self, step: Step, samples: list[Sampled]) -> list[Event]:
        for (row, _), sampled in zip(step.samples, samples, strict=True):
            if row.finish_reason is None and sampled.token >= 0:
                self.drawn[row.request.id, row.row].append(sampled.token)
                self.first_token.setdefault(row.request.id, self.now)
        return self.take(self.scheduler.update(step, samples))

    def turn(self, pick: Callable[[Row], int] = lambda row: 1) -> Step | None:
        step = self.plan()
        if step is not None:
            self.update(step, self.run(step, pick))
        return step

    def turns(self, count: int, pick: Callable[[Row], int] = lambda row: 1) -> None:
        for _ in range(count):
            self.turn(pick)

    def drain(self, limit: int = 10_000) -> int:
        """Turn until nothing is left; how many turns that took."""
        for count in range(limit):
            if self.scheduler.idle:
                self.scheduler.check_integrity()
                return count
            assert self.turn() is not None, "rows are left but none is fed"
        raise AssertionError(f"not drained within {limit} steps")

    def abort(self, name: str) -> list[Event]:
        events = self.take(self.scheduler.abort(name))
        self.scheduler.check_integrity()
        return events

    def fail(self, step: Step, error: Exception) -> list[Event]:
        return self.take(self.scheduler.fail(step, error))

    def take(self, events: list[Event]) -> list[Event]:
        self.scheduler.check_integrity()
        for event in events:
            key = event.request_id, event.row
            assert key not in self.ends, "an event after the terminal one"
            self.told.setdefault(key, []).extend(event.tokens)
            self.texts[key] = self.texts.get(key, "") + event.text
            if event.finish_reason is not None:
                self.ends[key] = event
                self._check_end(key, event)
        self.events += events
        return events

    def reasons(self, name: str) -> list[FinishReason | None]:
        return [event.finish_reason for (request, _), event in sorted(self.ends.items()) if request == name]

    def _check_end(self, key: tuple[str, int], event: Event) -> None:
        drawn = self.drawn[key]
        assert self.told[key] == drawn
        assert self.texts[key] == "".join(letter(token) for token in drawn if token not in (END, STOP))
        assert event.usage is not None
        assert event.usage.completion_tokens == len(drawn)
        assert (event.finish_reason is FinishReason.ERROR) == (event.error is not None)


def distinct(rows: int, length: int, first: int = 1) -> list[tuple[int, ...]]:
    """Prompts that differ from each other in every token."""
    return [tuple(range(first + row * length, first + (row + 1) * length)) for row in range(rows)]


def fed(step: Step | None) -> dict[str, int]:
    """Tokens fed in a step, by request."""
    assert step is not None
    totals: dict[str, int] = {}
    for chunk in step.chunks:
        name = chunk.sequence.request.id
        totals[name] = totals.get(name, 0) + len(chunk.tokens)
    return totals


def held(world: World, name: str) -> int:
    owners = [owner for _, owner in world.ledger.held() if isinstance(owner, Row)]
    return sum(owner.request.id == name for owner in owners)
