"""What the scheduler promises, one case each; slots in test_turns.py, mixtures in test_scheduler_machine.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scheduler_fakes import END, NAN, STOP, World, distinct, fed, held, letter, parts

from rwkv_lightning.core import scheduler as scheduler_module
from rwkv_lightning.core.errors import RowFailed
from rwkv_lightning.core.ledger import LedgerMismatch, SlotLedger
from rwkv_lightning.core.request import FinishReason
from rwkv_lightning.core.scheduler import Scheduler, Sequence, Step

STOPPED, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


class TestARow:
    """From prompt to finish."""

    def test_text_tokens_and_usage(self) -> None:
        world = World(1)
        world.add("a", [(5, 6)], max_tokens=3)
        draws = iter([1, 2, 4])
        world.turns(3, lambda row: next(draws))
        assert [(event.text, event.tokens) for event in world.events] == [("B", [1]), ("C", [2]), ("E", [4])]
        end = world.events[-1]
        assert end.finish_reason is LENGTH
        assert end.usage is not None
        assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens) == (2, 0, 3)
        assert world.runner.fed == 4  # the last drawn token is never fed

    @pytest.mark.parametrize(
        ("draws", "reason", "text"),
        [
            ([1, 2, END], STOPPED, "BC"),
            ([1, 3, END], STOPPED, "BD"),  # held back, and certain once the row has ended
            ([1, STOP], STOPPED, "B"),
            ([1, 2, STOP], STOPPED, "BC"),  # the stop comes with the last token allowed: still a stop
            ([1, 2, 3], LENGTH, "BCD"),
        ],
    )
    def test_how_it_ends(self, draws: list[int], reason: FinishReason, text: str) -> None:
        world = World(1)
        world.add("a", [(5,)], max_tokens=3)
        world.turns(len(draws), lambda row: draws[len(row.generated)])
        assert world.reasons("a") == [reason]
        assert world.texts["a", 0] == text
        assert world.scheduler.idle

    def test_the_slot_is_free_in_the_step_that_ends_the_row(self) -> None:
        world = World(1)
        world.add("a", [(5,)], max_tokens=1)
        world.turn()
        assert (world.ledger.free, world.scheduler.num_running) == (1, 0)

    def test_events_gather_chunk_size_tokens(self) -> None:
        world = World(1)
        world.add("a", [(5,)], max_tokens=8, chunk_size=3)
        world.drain()
        assert [event.tokens for event in world.events] == [[1, 1, 1], [1, 1, 1], [1, 1]]
        assert [event.text for event in world.events] == ["BBB", "BBB", "BB"]

    def test_tokens_without_text_wait_for_their_text(self) -> None:
        world = World(1)
        world.add("a", [(5,)], max_tokens=4)
        draws = [3, 1, 3, 3]
        world.turns(4, lambda row: draws[len(row.generated)])
        assert [(event.text, event.tokens) for event in world.events] == [("DB", [3, 1]), ("DD", [3, 3])]

    def test_nan_ends_that_row_alone(self) -> None:
        world = World(4)
        world.add("a", distinct(2, 2), max_tokens=5)
        world.add("b", [(5,)], max_tokens=5)
        world.turns(2)
        world.turn(lambda row: NAN if (row.request.id, row.row) == ("a", 1) else 1)
        assert world.ends.keys() == {("a", 1)}
        error = world.ends["a", 1].error
        assert isinstance(error, RowFailed)
        assert "row 1" in error.message
        assert world.told["a", 1] == [1, 1]
        world.drain()
        assert world.reasons("a") == [LENGTH, ERROR]
        assert world.reasons("b") == [LENGTH]

    def test_a_given_state_is_restored_and_its_cached_tokens_are_not_fed(self) -> None:
        world = World(2)
        world.add("a", [(5, 6, 4), (5, 6, 2)], max_tokens=1, rows=[parts((5, 6), 2), parts((8, 9))])
        step = world.turn()
        assert step is not None
        assert (len(step.restores), step.resets) == (2, [])
        assert world.runner.fed == 1 + 3
        usages = [world.ends["a", row].usage for row in (0, 1)]
        assert [(usage.prompt_tokens, usage.cached_tokens) for usage in usages if usage] == [(3, 2), (3, 0)]


class TestPrompts:
    def test_a_lone_prompt_gets_the_whole_budget(self) -> None:
        world = World(4)
        world.add("a", [tuple(range(1, 1301))], max_tokens=1)
        assert [fed(world.turn()) for _ in range(3)] == [{"a": 512}, {"a": 512}, {"a": 276}]
        assert world.reasons("a") == [LENGTH]

    @pytest.mark.parametrize("together", [True, False])
    def test_two_long_prompts_are_read_side_by_side(self, together: bool) -> None:
        world = World(4)
        prompts = distinct(2, 10_000)
        for index, batch in enumerate([prompts] if together else [[prompt] for prompt in prompts]):
            world.add(f"r{index}", batch, max_tokens=1)
        for _ in range(39):
            step = world.turn()
            assert step is not None
            assert [len(chunk.tokens) for chunk in step.chunks] == [256, 256]
        world.turn()
        assert len(world.ends) == 2

    def test_a_large_chunk_leaves_half_the_budget_to_a_second_prompt(self) -> None:
        world = World(4, prefill_budget=8, chunk=100)
        world.add("a", distinct(2, 50), max_tokens=1)
        step = world.turn()
        assert step is not None
        assert [len(chunk.tokens) for chunk in step.chunks] == [4, 4]

    def test_a_prompt_under_way_advances_whoever_arrives(self) -> None:
        world = World(64)
        world.add("long", [tuple(range(1, 2561))], max_tokens=1)
        world.turn()
        for index in range(8):
            world.add(f"new{index}", distinct(3, 256), max_tokens=1)
            assert fed(world.turn()).get("long") == 256

    def test_turns_go_round_the_requests(self) -> None:
        """One request's many prompts do not outweigh another's single one."""
        world = World(8)
        world.add("many", distinct(4, 2000), max_tokens=1)
        world.turn()
        world.add("one", [tuple(range(1, 2001))], max_tokens=1)
        shares = [fed(world.turn()) for _ in range(7)]
        assert shares == [{"many": 256, "one": 256}] * 7

    def test_a_newcomer_begins_beside_many_prompts_under_way(self) -> None:
        world = World(64)
        for index in range(40):
            world.add(f"long{index}", [tuple(range(1, 5001))], max_tokens=1)
        world.turns(30)
        world.add("chat", [(5, 6, 4)], max_tokens=2)
        world.turns(41)  # those of the forty that have not begun yet come first
        assert world.first_token["chat"] - 30 <= 41
        world.add("next", [(5, 6, 4)], max_tokens=2)
        world.turn()
        assert "next" in world.first_token

    def test_decoding_goes_on_beside_prompts(self) -> None:
        world = World(8)
        world.add("chats", distinct(4, 2), max_tokens=50)
        world.turn()
        world.add("long", [tuple(range(1, 5001))], max_tokens=1)
        assert [fed(world.turn()) for _ in range(5)] == [{"chats": 4, "long": 512}] * 5

    def test_decoding_rows_come_first_in_a_step(self) -> None:
        world = World(8)
        world.add("chats", distinct(3, 2), max_tokens=50)
        world.turn()
        world.add("new", distinct(2, 3), max_tokens=50)
        step = world.turn()
        assert step is not None
        assert [chunk.sequence.request.id for chunk in step.chunks] == ["chats"] * 3 + ["new"] * 2
        assert [index for _, index in step.samples] == [0, 1, 2, 3, 4]


class TestEqualPrompts:
    def test_are_read_once(self) -> None:
        world = World(16)
        world.add("a", [tuple(range(1, 101))] * 10, max_tokens=1)
        step = world.turn()
        assert step is not None
        assert world.runner.fed == 100
        assert len(step.samples) == 10
        assert {index for _, index in step.samples} == {0}
        assert len(world.ends) == 10

    def test_go_on_in_their_own_slots_where_there_are_some(self) -> None:
        world = World(3)
        world.add("a", [(5, 6, 4, 2)] * 7, max_tokens=3)
        step = world.turn()
        assert step is not None
        assert len(step.forks) == 2
        assert [len(followers) for _, followers in step.fork_saves] == [4]
        scheduler = world.scheduler
        assert (scheduler.num_running, scheduler.num_swapped, scheduler.num_waiting) == (3, 4, 0)
        world.drain()
        assert world.runner.fed == 4 + 7 * 2
        assert world.reasons("a") == [LENGTH] * 7

    def test_different_initial_states_are_not_equal(self) -> None:
        world = World(8)
        first, second = (8, 9), (9, 8)
        world.add("a", [(5, 6)] * 4, max_tokens=1, rows=[parts(first), parts(second), parts(first), parts()])
        world.drain()
        assert world.runner.fed == 3 * 2

    def test_different_shares_of_it_cached_are_not_equal(self) -> None:
        world = World(8)
        state = (5, 6)
        world.add("a", [(5, 6, 4)] * 3, max_tokens=1, rows=[parts(state, 2), parts(state, 2), parts(state)])
        world.drain()
        assert world.runner.fed == 1 + 3

    def test_come_in_order_and_before_prompts_not_begun(self) -> None:
        world = World(1)
        world.add("a", [(5, 6)] * 4 + [(4,)], max_tokens=2)
        world.drain()
        assert list(world.ends) == [("a", row) for row in range(5)]

    def test_rows_may_draw_differently(self) -> None:
        world = World(4)
        world.add("a", [(5, 6)] * 4, max_tokens=2)
        world.turns(2, lambda row: 1 + row.row % 2)
        assert [world.texts["a", row] for row in range(4)] == [letter(1 + row % 2) * 2 for row in range(4)]


class TestAbort:
    def waiting(self, world: World) -> None:
        world.add("other", distinct(1, 2), max_tokens=50)
        world.turn()
        world.add("a", [(5,)])

    def reading(self, world: World) -> None:
        world.add("a", [tuple(range(1, 2000))])
        world.turn()

    def running(self, world: World) -> None:
        world.add("a", [(5,)], max_tokens=50)
        world.turns(3)

    def swapped(self, world: World) -> None:
        world.add("a", [(5,)], max_tokens=50)
        world.turn()
        world.add("other", [(6,)], max_tokens=50)
        world.turns(10)
        assert (world.scheduler.num_swapped, held(world, "other")) == (1, 1)

    def following(self, world: World) -> None:
        world.add("a", [tuple(range(1, 2000))] * 3)
        world.turn()
        assert world.scheduler.num_waiting == 2

    def forked_without_slot(self, world: World) -> None:
        world.add("a", [(5, 6)] * 3, max_tokens=50)
        world.turn()
        assert world.scheduler.num_swapped == 2

    @pytest.mark.parametrize("state", [waiting, reading, running, swapped, following, forked_without_slot])
    def test_in_any_state(self, state: Callable[[TestAbort, World], None]) -> None:
        world = World(1, quantum=10)
        state(self, world)
        rows = sum(key[0] == "a" for key in world.drawn)
        events = world.abort("a")
        assert [event.finish_reason for event in events] == [ABORT] * rows
        assert held(world, "a") == 0
        assert world.abort("a") == []
        world.drain()
        assert world.ledger.free == 1
        assert all(event.finish_reason is LENGTH for key, event in world.ends.items() if key[0] == "other")

    def test_while_its_step_runs(self) -> None:
        world = World(2)
        world.add("a", [(5, 6)] * 4, max_tokens=9)
        world.add("b", [(6,)], max_tokens=2)
        step = world.plan()
        assert step is not None
        samples = world.run(step)
        assert len(world.abort("a")) == 4
        assert {event.request_id for event in world.update(step, samples)} == {"b"}
        world.drain()
        assert world.reasons("b") == [LENGTH]

    def test_text_held_back_is_not_lost(self) -> None:
        world = World(1)
        world.add("a", [(5,)], max_tokens=9)
        world.turn(lambda row: 3)
        (event,) = world.abort("a")
        assert (event.text, event.tokens) == ("D", [3])

    def test_unknown_requests_are_nobodys(self) -> None:
        assert World(1).abort("nobody") == []


class TestFail:
    def test_ends_the_rows_of_the_step_and_no_others(self) -> None:
        world = World(1, quantum=4)
        world.add("a", [(5,)], max_tokens=30)
        world.add("b", [(6,)], max_tokens=30)
        world.turns(6)
        assert (held(world, "b"), world.scheduler.num_swapped) == (1, 1)
        step = world.plan()
        assert step is not None
        error = RuntimeError("the model broke")
        (event,) = world.fail(step, error)
        assert (event.request_id, event.finish_reason, event.error) == ("b", ERROR, error)
        assert world.ledger.free == 1
        world.drain()
        assert world.reasons("a") == [LENGTH]

    @pytest.mark.parametrize("saved", [True, False])
    def test_a_row_that_was_being_swapped_out_survives_if_its_state_was_saved(self, saved: bool) -> None:
        world = World(1, quantum=2)
        world.add("a", [(5,)], max_tokens=9)
        world.turn()
        world.add("b", [(6,)], max_tokens=9)
        world.turn()
        step = world.plan()
        assert step is not None
        assert [row.request.id for row, _ in step.saves] == ["a"]
        if saved:
            world.run(step)
        world.fail(step, RuntimeError("broken"))
        world.drain()
        assert world.reasons("a") == [LENGTH if saved else ERROR]
        assert world.reasons("b") == [ERROR]

    def test_rows_that_wait_for_a_failed_prompt_fail_with_it(self) -> None:
        world = World(4)
        world.add("a", [tuple(range(1, 2000))] * 3 + [(5,)], max_tokens=2)
        world.turn()
        world.turn()
        step = world.plan()
        assert step is not None
        world.fail(step, RuntimeError("broken"))
        assert world.reasons("a") == [ERROR, ERROR, ERROR, LENGTH]
        assert world.scheduler.idle


class TestKeeper:
    """A finished row's slot may go over to a cache, until it is needed."""

    def test_takes_the_slot_over_and_gives_it_up_again(self) -> None:
        kept: list[int] = []
        ledger = SlotLedger(1, reclaim=lambda: kept.pop() if kept else None)

        def keep(row: Sequence) -> bool:
            assert row.slot is not None
            assert row.finish_reason is LENGTH
            kept.append(row.slot)
            ledger.transfer(row.slot, "cache")
            return True

        world = World(1)
        world.ledger = world.runner.ledger = ledger
        world.scheduler = Scheduler(ledger, keeper=keep)
        world.add("a", [(5, 6)], max_tokens=2)
        world.drain()
        assert (kept, ledger.owner(0)) == ([0], "cache")
        assert world.runner.states[0] == (5, 6, 1)  # all but the last token drawn
        assert (world.scheduler.slots_used, world.scheduler.num_running) == (1, 0)
        world.add("b", [(4,)], max_tokens=2)
        world.drain()
        assert world.reasons("b") == [LENGTH]

    def test_is_offered_good_endings_only_and_a_row_without_slot_by_its_snapshot(self) -> None:
        offered: list[tuple[int, int | None, object]] = []

        def refuse(row: Sequence) -> bool:
            offered.append((row.row, row.slot, row.snapshot))
            return False

        world = World(1)
        world.scheduler = Scheduler(world.ledger, keeper=refuse)
        world.add("a", [(5, 6)] * 3, max_tokens=1)
        world.turn(lambda row: NAN if row.row == 1 else 1)
        assert offered == [(0, 0, None), (2, None, (5, 6))]
        assert world.ledger.free == 1
        world.add("b", [(5, 6)], max_tokens=9)
        world.turn()
        world.abort("b")
        assert len(offered) == 2


class TestSharedBeginnings:
    """Rows whose prompts begin alike: one reads for the others."""

    STEM = tuple(range(1, 25))

    def test_what_is_alike_is_read_once_also_in_parts(self) -> None:
        """Three rows share 24 tokens, two of them 20 more."""
        more = tuple(range(30, 50))
        world = World(4, prefill_budget=512, chunk=100)
        world.add("a", [(*self.STEM, 70), (*self.STEM, *more, 71), (*self.STEM, *more, 72)], max_tokens=1)
        world.drain()
        assert world.runner.fed == 24 + 20 + 3
        assert world.reasons("a") == [LENGTH] * 3

    @pytest.mark.parametrize("slots", [1, 2, 4])
    @pytest.mark.parametrize("failing", range(1, 5))
    def test_any_failing_step_ends_every_row_that_has_no_good_state(self, slots: int, failing: int) -> None:
        """Also those that were to copy one in it, and those that wait for one of them: nobody goes on from nothing."""
        more = tuple(range(30, 50))
        prompts = [(*self.STEM, 70, 75), (*self.STEM, *more, 71), (*self.STEM, *more, 72), (*self.STEM, *more, 71)]
        world = World(slots, prefill_budget=24, chunk=12)
        world.add("a", prompts, max_tokens=2)
        world.turns(failing - 1)
        step = world.plan()
        assert step is not None
        world.fail(step, RuntimeError("broken"))
        world.drain()
        assert len(world.reasons("a")) == 4
        assert ERROR in world.reasons("a")


class TestMisuse:
    def test_a_request_is_added_once(self) -> None:
        world = World(1)
        world.add("a", [(5,)])
        with pytest.raises(ValueError, match="'a' is already here"):
            world.add("a", [(5,)])

    @pytest.mark.parametrize(
        ("prompts", "rows", "message"),
        [
            ([], [], "0 prompts and 0 rows"),
            ([(5,)], [parts(), parts()], "1 prompts and 2 rows"),
            ([(5,), ()], None, "row 1 .* has 0 tokens and none to feed"),
            ([(5, 6)], [parts((5, 6), 2)], "row 0 .* has 2 tokens and none to feed"),
        ],
    )
    def test_rows_must_have_something_to_feed(self, prompts, rows, message: str) -> None:  # type: ignore[no-untyped-def]
        world = World(1)
        with pytest.raises(ValueError, match=message):
            world.add("a", prompts, rows=rows)
        assert world.scheduler.idle

    def test_steps_are_taken_one_at_a_time(self) -> None:
        world = World(1)
        world.add("a", [(5,)], max_tokens=9)
        first = world.plan()
        assert first is not None
        with pytest.raises(RuntimeError, match="step 1 has been neither updated nor failed"):
            world.scheduler.schedule()
        with pytest.raises(RuntimeError, match="step 7 is not the one in flight"):
            world.scheduler.update(Step(7), [])
        world.update(first, world.run(first))
        with pytest.raises(RuntimeError, match="step 1 is not the one in flight"):
            world.scheduler.fail(first, RuntimeError("late"))

    def test_one_draw_per_sample(self) -> None:
        world = World(1)
        world.add("a", [(5,)])
        step = world.plan()
        assert step is not None
        with pytest.raises(ValueError, match="shorter"):
            world.scheduler.update(step, [])

    @pytest.mark.parametrize("option", ["prefill_budget", "chunk", "quantum", "swaps_per_step"])
    def test_options_leave_room_to_work(self, option: str) -> None:
        with pytest.raises(ValueError, match="at least"):
            World(1, **{option: 0})


def test_a_slot_that_goes_astray_is_loud_when_idle() -> None:
    world = World(2)
    world.scheduler.check_integrity()
    row = Sequence.__new__(Sequence)
    world.ledger.acquire(row)
    with pytest.raises(
        LedgerMismatch, match=r"rows hold 1 slots by the ledger \(1 free, 1 held, 2 in total\) and 0 by"
    ):
        world.scheduler.check_integrity()


def test_nothing_to_do_is_no_step() -> None:
    world = World(1)
    assert world.scheduler.schedule() is None
    world.add("a", [(5,)], max_tokens=1)
    world.turn()
    assert world.scheduler.schedule() is None


FORBIDDEN = {"torch", "asyncio", "threading", "time", "_thread", "concurrent", "datetime", "queue"}


def test_no_tensors_clocks_or_threads_are_loaded() -> None:
    code = (
        "import sys; before = set(sys.modules); import rwkv_lightning.core.scheduler; "
        "print(*sorted(name.split('.')[0] for name in set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rwkv_lightning" in loaded
    assert not FORBIDDEN & set(loaded)


@pytest.mark.parametrize("name", ["scheduler", "planner", "seats", "turns", "sequence", "ledger", "request"])
def test_no_tensors_clocks_or_threads_are_imported(name: str) -> None:
    """The same by name: an interpreter may have loaded the clock already."""
    source = Path(scheduler_module.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert "__future__" in imported
    assert not FORBIDDEN & imported
