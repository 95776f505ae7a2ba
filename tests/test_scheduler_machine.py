"""The scheduler under any sequence of arrivals, steps, failures and aborts: what must hold in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from scheduler_fakes import CUT, END, NAN, STOP, Seen, World, parts

from rwkv_lightning.core import sharing
from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.sessions import Deletion
from rwkv_lightning.core.request import FinishReason
from rwkv_lightning.core.scheduler import Sequence, Step

PROMPTS = st.lists(st.integers(1, 6), min_size=1, max_size=12).map(tuple)
DRAWS = st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 6, END, STOP, CUT, NAN]), min_size=1, max_size=16)

Moment = Literal["between steps", "in a planned step", "while steps run"]
COPIES: st.SearchStrategy[Moment] = st.sampled_from(get_args(Moment))


class SchedulerMachine(RuleBasedStateMachine):
    """Rows draw from `draws` in turn. The fakes check states, owners, texts and terminal events on the way."""

    @initialize(
        slots=st.integers(1, 6),
        budget=st.integers(2, 12),
        chunk=st.integers(1, 6),
        quantum=st.integers(1, 5),
        swaps=st.integers(1, 3),
        l1=st.integers(0, 3),
        l2=st.sampled_from([0, 1, 2, 1000]),
    )
    def begin(self, slots: int, budget: int, chunk: int, quantum: int, swaps: int, l1: int, l2: int) -> None:
        options = {"prefill_budget": budget, "chunk": chunk, "quantum": quantum, "swaps_per_step": swaps}
        self.world = World(slots, l1, l2, **options)
        self.quantum = quantum
        self.names: list[str] = []
        self.most_rows = 0

    @rule(
        stems=st.lists(st.sampled_from([(), (4, 4), (4, 4, 2, 2, 3)]), min_size=1, max_size=3),
        ends=st.lists(PROMPTS, min_size=1, max_size=3),
        pattern=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        chunk_size=st.integers(1, 4),
        start=st.sampled_from([None, (8, 9)]),
        with_cached=st.booleans(),
        captures=st.sets(st.integers(1, 12)),
    )
    def add(
        self,
        stems: list[tuple[int, ...]],
        ends: list[tuple[int, ...]],
        pattern: list[int],
        max_tokens: int,
        chunk_size: int,
        start: tuple[int, ...] | None,
        with_cached: bool,
        captures: set[int],
    ) -> None:
        prompts = [stems[index % len(stems)] + ends[index % len(ends)] for index in pattern]
        cached = [min(2, len(prompt) - 1) if start and with_cached else 0 for prompt in prompts]
        wanted = [sorted(p for p in captures if cached[i] < p <= len(prompt)) for i, prompt in enumerate(prompts)]
        rows = [parts(start, count, captures=marks) for count, marks in zip(cached, wanted, strict=True)]
        self.world.add(self.new_name(), prompts, max_tokens, rows, chunk_size)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=2), rows=st.integers(1, 5), max_tokens=st.integers(1, 6))
    def add_known(self, prompts: list[tuple[int, ...]], rows: int, max_tokens: int) -> None:
        """Rows whose whole prompts are cached, logits included: they need no forward for their first token."""
        chosen = [prompts[row % len(prompts)] for row in range(rows)]
        states = {prompt: Seen(prompt) for prompt in prompts}
        known = [parts(states[prompt], len(prompt), logits=states[prompt]) for prompt in chosen]
        self.world.add(self.new_name(), chosen, max_tokens, known)

    @rule(session=st.sampled_from("abc"), prompt=PROMPTS, max_tokens=st.integers(1, 8))
    def add_turn(self, session: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        if not any(target.key == SessionKey(session) for target in self.world.targets.values()):
            self.world.add_turn(self.new_name(), session, prompt, max_tokens)

    @rule(session=st.sampled_from("abc"))
    def delete(self, session: str) -> None:
        self.world.cache.delete(Deletion(session))
        self.world.sessions.pop(SessionKey(session), None)
        assert self.world.cache.find(SessionKey(session)) is None

    @rule(session=st.sampled_from("abc"), at=COPIES, draws=DRAWS)
    def copy_out(self, session: str, at: Moment, draws: list[int]) -> None:
        """As the writer does."""
        kept = self.world.cache.find(SessionKey(session))
        if kept is None:
            return
        seen = self.world.sessions[SessionKey(session)]

        def copy() -> None:
            record = self.world.cache.record_of(kept)
            assert tuple(record.snapshot) + record.tail == seen  # type: ignore[arg-type]

        self.beside_steps(copy, at, draws)
        self.world.cache.close(kept)

    @rule(times=st.integers(1, 3), at=COPIES, draws=DRAWS)
    def copy_ahead(self, times: int, at: Moment, draws: list[int]) -> None:
        """As the copier does."""
        for _ in range(times):
            self.beside_steps(self.world.cache.moves.copy_ahead, at, draws)

    def beside_steps(self, copy: Callable[[], object], at: Moment, draws: list[int]) -> None:
        """Copy states out of slots at any moment: also while a step is planned that overwrites one of them."""
        world, pick = self.world, picker(draws)
        if at == "while steps run":
            world.during_copy = lambda: world.turns(2, pick)
        step = world.plan() if at == "in a planned step" else None
        copy()
        world.during_copy = None
        if step is not None:
            world.update(step, world.run(step, pick))

    def new_name(self) -> str:
        self.names.append(f"r{len(self.names)}")
        return self.names[-1]

    @rule(draws=DRAWS, times=st.integers(1, 6))
    def turns(self, draws: list[int], times: int) -> None:
        self.world.turns(times, picker(draws))
        self._nobody_waits_too_long()

    @rule(data=st.data(), draws=DRAWS)
    def abort_while_a_step_runs(self, data: st.DataObject, draws: list[int]) -> None:
        step = self.world.plan()
        if step is not None:
            samples = self.world.run(step, picker(draws))
            self.abort(data)
            self.world.update(step, samples)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.names:
            return
        name = data.draw(st.sampled_from(self.names))
        open_rows = {key for key in self.world.drawn if key[0] == name} - self.world.ends.keys()
        events = self.world.abort(name)
        assert {(event.request_id, event.row) for event in events} == open_rows
        assert all(event.finish_reason is FinishReason.ABORT for event in events)
        assert self.world.abort(name) == []

    @rule(carried_out=st.booleans())
    def fail(self, carried_out: bool) -> None:
        """A step fails at its very beginning, or after all state has been moved."""
        step = self.world.plan()
        if step is None:
            return
        if carried_out:
            self.world.run(step)
        mine = rows_of(step, carried_out)
        events = self.world.fail(step, RuntimeError("broken"))
        assert {(event.request_id, event.row) for event in events} == {(row.request.id, row.row) for row in mine}
        assert all(event.finish_reason is FinishReason.ERROR for event in events)

    @invariant()
    def counts_agree(self) -> None:
        scheduler = self.world.scheduler
        scheduler.check_integrity()
        unfinished = len(self.world.drawn) - len(self.world.ends)
        assert scheduler.num_waiting + scheduler.num_running + scheduler.num_swapped == unfinished
        assert scheduler.slots_used - self.world.held_by_cache() == scheduler.num_running <= scheduler.slots_total
        assert scheduler.idle == (unfinished == 0)

    @invariant()
    def sessions_are_as_their_last_turns_left_them(self) -> None:
        self.world.check_sessions()
        tier = self.world.cache.host.tier
        assert tier.nbytes <= tier.budget

    def _nobody_waits_too_long(self) -> None:
        """Every unfinished request is fed again before all others have had a quantum each, and a little."""
        world = self.world
        waiting = {name for name, _ in world.drawn.keys() - world.ends.keys()}
        bound = (self.quantum + 2) * (len(self.names) + 1)
        assert all(world.now - world.last_fed[name] <= bound for name in waiting)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        # Every step feeds at least one token, and no token is ever fed twice.
        left = sum(
            len(row.prompt) + row.params.max_tokens
            for group in world.scheduler._groups.values()
            for row in group.rows.values()
        )
        world.drain(left + 1)
        assert world.ends.keys() == world.drawn.keys()
        assert world.ledger.free + world.held_by_cache() == world.ledger.total
        world.cache.move_out()  # what a step that was not carried out has left to do
        world.check_sessions()
        assert not world.cache.slots.leaving()
        assert len(world.cache.turns) == 0
        assert all(kept.users == 0 for kept in world.cache.current())
        for key, row in world.runner.captured.items():
            assert row == sorted(set(row)), f"{key} was captured out of order, or twice"


def picker(draws: list[int]):  # type: ignore[no-untyped-def]
    """Draw from a list round and round, differently per row."""
    return lambda row: draws[(len(row.generated) * 5 + row.row) % len(draws)]


def rows_of(step: Step, carried_out: bool) -> set[Sequence]:
    rows = {chunk.sequence for chunk in step.chunks} | {row for row, _ in step.samples}
    rows |= set(step.forked)
    if not carried_out:
        rows |= {row for row, _ in step.saves}
    waiting = list(rows)
    while waiting:
        followers = waiting.pop().followers
        rows |= set(followers)
        waiting += followers
    return rows


def drive(examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    profile = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "LEAST_SHARED", 2)  # short prompts share their beginnings too
        run_state_machine_as_test(SchedulerMachine, settings=profile)


def test_whatever_happens() -> None:
    drive(examples=120, steps=40)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_whatever_happens_for_long() -> None:
    drive(examples=3000, steps=100)
