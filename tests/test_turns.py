"""Slots are shared fairly between requests: who gets one, who gives one up, and who is left in peace."""

from __future__ import annotations

from itertools import count

import pytest
from scheduler_fakes import World, distinct, fed, held

from rwkv_lightning.core.request import FinishReason, GenerationRequest, SamplingParams
from rwkv_lightning.core.sequence import Group
from rwkv_lightning.core.turns import Ranking

LENGTH = FinishReason.LENGTH


class TestFairSlots:
    @pytest.mark.parametrize("slots", [960, 64, 2])
    @pytest.mark.parametrize("steps_before", [3, 30])
    def test_a_chat_beside_a_big_batch_answers_at_once(self, slots: int, steps_before: int) -> None:
        """While the batch is being read as well as when all its rows decode; all slots taken in most cases."""
        world = World(slots)
        world.add("batch", distinct(960, 10), max_tokens=200)
        world.turns(steps_before)
        world.add("chat", [tuple(range(1, 41))], max_tokens=20)
        world.turns(3)
        assert "chat" in world.first_token
        world.turns(22)
        assert world.reasons("chat") == [LENGTH]  # and goes on without a break
        assert not world.ends.keys() - {("chat", 0)}

    def test_two_batches_share_the_slots(self) -> None:
        world = World(8, quantum=16)
        world.add("a", distinct(40, 3), max_tokens=60)
        world.turns(5)
        world.add("b", distinct(40, 3), max_tokens=60)
        world.turns(3)
        assert (held(world, "a"), held(world, "b")) == (4, 4)
        before = dict(world.runner.steps_of)
        world.turns(200)
        a, b = (world.runner.steps_of[name] - before.get(name, 0) for name in "ab")
        assert abs(a - b) <= 0.05 * (a + b)

    def test_equal_holders_leave_each_other_alone(self) -> None:
        """No ping-pong: after the newcomer has its share, nothing more is swapped but what then resumes."""
        world = World(8, quantum=4)
        world.add("a", distinct(8, 3), max_tokens=100)
        world.turn()
        world.add("b", distinct(8, 3), max_tokens=100)
        saves = sum(len(step.saves) for step in iter(world.turn, None))
        assert saves == 4
        assert len(world.ends) == 16

    def test_a_free_slot_goes_to_who_holds_fewest(self) -> None:
        """Even if a row of somebody else has waited longer: giving it away would only mean taking it back."""
        world = World(3)
        world.add("gone", [(6,)], max_tokens=50)
        world.add("a", [(5,)] * 4, max_tokens=50)
        world.turn()
        assert (held(world, "a"), world.scheduler.num_swapped) == (2, 2)
        world.abort("gone")
        world.add("new", [(4,)], max_tokens=50)
        step = world.turn()
        assert step is not None
        assert (held(world, "a"), held(world, "new"), step.saves) == (2, 1, [])

    def test_swapped_rows_come_before_rows_not_begun(self) -> None:
        world = World(2)
        world.add("a", distinct(4, 2), max_tokens=6)
        world.turn()
        world.add("b", [(5,)], max_tokens=2)
        world.drain()
        assert list(world.ends) == [("b", 0), *(("a", row) for row in range(4))]

    def test_a_row_that_is_being_read_in_this_step_keeps_its_slot(self) -> None:
        world = World(2, prefill_budget=4, chunk=2, quantum=2)
        world.add("long", [tuple(range(1, 11))])
        world.add("short", [tuple(range(1, 6))])
        world.turns(2)
        world.add("first", [(5, 6)])
        world.add("second", [(5, 6)])
        step = world.turn()
        assert fed(step) == {"first": 2, "short": 1}  # one token of the budget is left, but no slot for `second`
        world.drain()

    def test_two_requests_past_their_quantum_do_not_swap_in_circles(self) -> None:
        world = World(8, quantum=1)
        for index in range(9):
            world.add(f"r{index}", [(5,)], max_tokens=30)
        world.turn()
        assert [len(step.saves) for step in (world.turn() for _ in range(20)) if step] == [1] * 20

    def test_a_request_with_two_slots_more_loses_its_youngest_row(self) -> None:
        world = World(2)
        world.add("a", distinct(2, 2), max_tokens=10)
        world.turn()
        world.add("b", [(5,)], max_tokens=10)
        step = world.turn()
        assert step is not None
        assert [(row.request.id, row.row) for row, _ in step.saves] == [("a", 1)]
        assert world.scheduler.num_swapped == 1

    def test_a_lone_row_keeps_its_slot_for_a_quantum(self) -> None:
        world = World(1, quantum=5)
        world.add("a", [(5,)], max_tokens=100)
        world.turn()
        world.add("b", [(6,)], max_tokens=100)
        swapped = [[row.request.id for row, _ in step.saves] for step in (world.turn() for _ in range(16)) if step]
        assert swapped == [[]] * 4 + [["a"]] + [[]] * 4 + [["b"]] + [[]] * 4 + [["a"]] + [[]]

    def test_a_hundred_requests_take_turns_on_eight_slots(self) -> None:
        quantum = 10
        world = World(8, quantum=quantum)
        for index in range(100):
            world.add(f"r{index}", [(1 + index,)], max_tokens=35)
        world.turns(13 * quantum)
        assert len(world.first_token) == 100
        assert list(world.first_token) == [f"r{index}" for index in range(100)]
        served = [len(world.drawn[f"r{index}", 0]) for index in range(100)]
        assert set(served) <= {quantum, 2 * quantum}  # nobody has had two turns more than another
        world.drain()
        assert len(world.ends) == 100

    def test_a_long_prompt_gives_way_after_its_quantum_too(self) -> None:
        world = World(1, quantum=3)
        world.add("a", [tuple(range(1, 5001))], max_tokens=1)
        world.turn()
        world.add("b", [(5,)], max_tokens=2)
        world.turns(3)
        assert world.first_token == {"b": 4}
        world.drain()
        assert world.runner.fed == 5000 + 2

    def test_an_endless_stream_of_newcomers_starves_nobody(self) -> None:
        world = World(4, quantum=4, prefill_budget=8, chunk=4)
        world.add("old", distinct(3, 30), max_tokens=20)
        for index in range(600):
            world.add(f"new{index}", [(5, 6)], max_tokens=4)
            world.turn()
        assert world.reasons("old") == [LENGTH] * 3

    def test_few_rows_are_swapped_in_one_step(self) -> None:
        world = World(32, swaps_per_step=3)
        world.add("batch", distinct(32, 2), max_tokens=50)
        world.turn()
        world.add("new", distinct(16, 2), max_tokens=50)
        assert [len(step.saves) for step in (world.turn() for _ in range(6)) if step] == [3, 3, 3, 3, 3, 1]

    def test_rows_of_a_request_begin_in_order(self) -> None:
        world = World(3)
        world.add("a", distinct(9, 2), max_tokens=4)
        begun: list[int] = []
        while step := world.turn():
            begun += [row.row for row, _ in step.samples if row.row not in begun]
        assert begun == list(range(9))


class TestRanking:
    """The order behind the turns."""

    def groups(self, count: int) -> list[Group]:
        return [Group(GenerationRequest(str(i), [(5,)], SamplingParams("fake", None, 1))) for i in range(count)]

    def order(self, ranking: Ranking) -> list[str]:
        names = []
        while place := ranking.first():
            names.append(place.group.request.id)
            ranking.drop(place.group)
        return names

    def test_lower_ranks_first_then_who_came_first(self) -> None:
        ranking = Ranking(count())
        for group, slots in zip(self.groups(5), [2, 0, 1, 0, 2], strict=True):
            ranking.place(group, (False, slots))
        assert self.order(ranking) == ["1", "3", "2", "0", "4"]

    def test_a_place_is_kept_until_the_rank_changes(self) -> None:
        ranking = Ranking(count())
        groups = self.groups(3)
        for group in groups:
            ranking.place(group, (False, 1))
        ranking.place(groups[0], (False, 1))
        ranking.place(groups[1], (False, 2))
        ranking.place(groups[1], (False, 1))
        assert self.order(ranking) == ["0", "2", "1"]

    def test_the_top_has_the_highest_rank(self) -> None:
        ranking = Ranking(count())
        assert ranking.top() is None
        groups = self.groups(3)
        for group, slots in zip(groups, [1, 4, 2], strict=True):
            ranking.place(group, (False, slots))
        assert ranking.top() is groups[1]
        ranking.drop(groups[1])
        ranking.drop(groups[1])
        assert ranking.top() is groups[2]
