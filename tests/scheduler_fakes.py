"""A model for scheduler tests whose state is the tuple of tokens it has seen, so that any wrong state shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from rwkv_lightning.core.cache.hierarchy import CacheConfig, StateCache
from rwkv_lightning.core.cache.kept import Kept, SessionTarget
from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.record import Expected
from rwkv_lightning.core.cache.sessions import Turn
from rwkv_lightning.core.ledger import SlotLedger
from rwkv_lightning.core.request import Event, FinishReason, GenerationRequest, SamplingParams, StateTarget
from rwkv_lightning.core.scheduler import RowParts, Sampled, Scheduler, Step
from rwkv_lightning.core.scheduler import Sequence as Row
from rwkv_lightning.core.sequence import Backup

END = 0
HELD = 3  # multiples of it give no text until the next token
STOP = 7
CUT = 5  # a stop text of which the tokens held back are a part
NAN = -1
UNDEFINED = ("undefined",)

History = tuple[object, ...]


def letter(token: int) -> str:
    return chr(ord("A") + token)


class FakeOutput:
    """One letter per token; some are held back for a token, STOP is a stop text, and so is CUT with what is held."""

    shown = 0

    def __init__(self) -> None:
        self.stopped = False
        self.covered = 0
        self._held = ""

    @property
    def pending(self) -> int:
        return len(self._held)

    def push(self, token: int) -> str:
        assert not self.stopped, "a token after the stop"
        if token in (STOP, CUT):
            self.stopped = True
            return self.flush() if token == STOP else ""
        self._held += letter(token)
        return "" if token % HELD == 0 else self.flush()

    def flush(self) -> str:
        text, self._held = self._held, ""
        self.covered += len(text)
        return text


def text_of(tokens: Sequence[int]) -> str:
    """The text of a whole row."""
    output = FakeOutput()
    text = "".join(output.push(token) for token in tokens if token != END)
    return text if output.stopped else text + output.flush()


class Seen(tuple[object, ...]):
    """A state in host memory: the tokens it has seen."""

    nbytes = 8


def parts(
    snapshot: object = None, cached: int = 0, *, captures: Sequence[int] = (), logits: History | None = None
) -> RowParts:
    """Logits are what was seen before them."""
    return RowParts(None, None, FakeOutput(), snapshot, cached, logits, tuple(captures))  # type: ignore[arg-type]


class FakeRunner:
    """Carries steps out on remembered token histories and checks each against what the row has to be fed."""

    def __init__(self, ledger: SlotLedger) -> None:
        self.ledger = ledger
        self.states: list[History] = [UNDEFINED] * ledger.total
        self.initial: dict[tuple[str, int], History] = {}  # by request and row
        self.captured: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.fed = 0  # tokens in all
        self.steps_of: Counter[str] = Counter()  # decode steps by request

    def run(self, step: Step, pick: Callable[[Row], int]) -> list[Sampled]:
        self._move_states(step)
        seen = [*self._forward(step), *step.ready]
        self._capture(step, seen)
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
        sources = {source for source, _ in step.copies}  # a state may have left its slot since the step was planned
        for slot in range(self.ledger.total):
            if self.ledger.owner(slot) is None and slot not in sources:
                self.states[slot] = UNDEFINED
        for source, slot in step.copies:
            assert source != slot
            self.states[slot] = self.states[source]
        for row, slot in step.restores:
            self.states[slot] = getattr(row.snapshot, "snapshot", row.snapshot)
        for slot in step.resets:
            self.states[slot] = ()
        for row, slot in step.backups:
            assert slot == row.slot
            assert self.states[slot] == self._expected(row)[:-1], "a backup of another state"
            row.backup, row.wants_backup = Backup(len(row.generated) - 1, Seen(self.states[slot])), False

    def _capture(self, step: Step, seen: list[History]) -> None:
        for capture in step.captures:
            row = capture.sequence
            state = self.states[capture.slot]
            assert state == self.initial[row.request.id, row.row] + row.prompt[row.cached : capture.position]
            assert capture.logits_row is None or seen[capture.logits_row] == state
            assert (capture.logits_row is not None) == (capture.position == len(row.prompt))
            self.captured[row.request.id, row.row].append(capture.position)

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
    """A scheduler over a fake model and the real cache, with every row's events collected and checked.

    Args:
        l1: slots that sessions may keep.
        l2: states of sessions in host memory.
    """

    def __init__(self, slots: int, l1: int = 0, l2: int = 1000, **options: int) -> None:
        self.ledger = SlotLedger(slots, reclaim=lambda: self.cache.reclaim())
        self.runner = FakeRunner(self.ledger)
        config = CacheConfig(l1, l2 * Seen.nbytes, 0, 1.0, False)
        self.cache = StateCache(config, Expected("model"), None, self.export, lambda tokens: "")  # type: ignore[arg-type]
        self.cache.moves.close()  # no copies but those that a test asks for: the same calls give the same course
        self.scheduler = Scheduler(self.ledger, keeper=self.keep, **options)  # type: ignore[arg-type]
        self.sessions: dict[SessionKey, History] = {}  # everything each session's last turn has seen
        self.targets: dict[str, SessionTarget] = {}
        self.drawn: dict[tuple[str, int], list[int]] = {}
        self.told: dict[tuple[str, int], list[int]] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.ends: dict[tuple[str, int], Event] = {}
        self.events: list[Event] = []
        self.first_token: dict[str, int] = {}  # request -> step of its first token
        self.last_fed: dict[str, int] = {}
        self.now = 0
        self.during_copy: Callable[[], None] | None = None  # what happens while the next state is copied out

    def export(self, slot: int) -> Seen:
        seen = self.runner.states[slot]
        beside = not self.cache.lock._is_owned()  # type: ignore[attr-defined]  # else a step waits for the copy
        if beside and self.during_copy is not None:
            during, self.during_copy = self.during_copy, None
            during()
            assert self.runner.states[slot] == seen, "a slot was written to while it was copied"
        return Seen(seen)

    def add(
        self,
        name: str,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int = 4,
        rows: Sequence[RowParts] | None = None,
        chunk_size: int = 1,
        target: SessionTarget | None = None,
    ) -> None:
        params = SamplingParams("fake", None, max_tokens)
        request = GenerationRequest(name, list(prompts), params, chunk_size, target=target or StateTarget())
        rows = rows or [parts() for _ in prompts]
        self.scheduler.add(request, rows)
        for index, row in enumerate(rows):
            self.drawn[name, index] = []
            self.runner.initial[name, index] = self.numbers(row.snapshot)
        self.last_fed[name] = self.now

    def add_turn(self, name: str, session: str, prompt: tuple[int, ...], max_tokens: int = 4) -> None:
        """One turn of a session, from where its last one left it."""
        key = SessionKey(session)
        base = self.cache.find(key)
        target = SessionTarget(key, self.cache.turns.begin(Turn(session)), base)
        self.targets[name] = target
        if base is not None:
            prompt = (*base.tail, *prompt)
        self.add(name, [prompt], max_tokens, [parts(base)], target=target)

    def keep(self, row: Row) -> bool:
        kept = self.cache.keep(row, self.ledger)
        target = row.request.target
        if isinstance(target, SessionTarget) and not target.turn.voided:
            seen = self.runner.initial[row.request.id, 0] + row.prompt
            self.sessions[target.key] = seen + tuple(row.generated[: row.output.covered])
            self.check_sessions()
        return kept

    def check_sessions(self) -> None:
        """What is kept of a session is what its last turn has seen, or nothing any more."""
        for key, seen in list(self.sessions.items()):
            kept = self.cache.find(key)
            if kept is None:
                del self.sessions[key]
                continue
            assert self.numbers(kept) + kept.tail == seen, "another state than the last turn's"
            self.cache.close(kept)

    def held_by_cache(self) -> int:
        """Slots that the ledger has in the cache's name."""
        return self.cache.slots.slots_held

    def numbers(self, snapshot: object) -> History:
        """What a state has seen, wherever it is."""
        if not isinstance(snapshot, Kept):
            return snapshot or ()  # type: ignore[return-value]
        slot = self.cache.slots._leaving.get(snapshot, snapshot.slot)
        return tuple(snapshot.snapshot) if slot is None else self.runner.states[slot]

    def plan(self) -> Step | None:
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.now += 1
        return step

    def run(self, step: Step, pick: Callable[[Row], int] = lambda row: 1) -> list[Sampled]:
        """The model's part of a step."""
        self.cache.move_out()
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
                self._end_turn(event)
        self.events += events
        return events

    def _end_turn(self, event: Event) -> None:
        target = self.targets.pop(event.request_id, None)
        if target is not None:
            self.cache.turns.end(target.turn)
            if target.base is not None:
                self.cache.close(target.base)

    def reasons(self, name: str) -> list[FinishReason | None]:
        return [event.finish_reason for (request, _), event in sorted(self.ends.items()) if request == name]

    def _check_end(self, key: tuple[str, int], event: Event) -> None:
        drawn = self.drawn[key]
        assert self.told[key] == drawn
        assert self.texts[key] == text_of(drawn)
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
