"""Which captured step a batch takes, and what is in its inputs, with a recorder in the place of a GPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
import torch

from rwkv_lightning.kernels.triton.graphs import NO_SLOT, SIZES, DecodeGraphs, DecodeInputs, Run


@dataclass
class Recorder:
    """A model of three logits, which say the token, the slot and the size of the step; and a device that captures."""

    fails_at: int = 0
    sizes_run: list[int] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)

    def step(self, given: DecodeInputs) -> torch.Tensor:
        size = given.rows.tokens
        self.sizes_run.append(size)
        self.touched |= set(given.rows.slots.tolist())
        return torch.stack([given.tokens, given.rows.slots, torch.full((size,), size)], dim=1)

    def capture(self, run: Run) -> Run:
        size = int(run()[0, 2])
        if size == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured.append(size)
        return run

    def graphs(self, most: int = 1024) -> DecodeGraphs:
        return DecodeGraphs(self.step, self.capture, "cpu", most)


def batch(*slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens 100 + slot for rows in these slots."""
    chosen = torch.tensor(slots, dtype=torch.int32)
    return 100 + chosen, chosen


def test_sizes_rise_and_waste_little() -> None:
    assert list(SIZES) == sorted(set(SIZES))
    for rows in range(1, SIZES[-1] + 1):
        size = DecodeGraphs(Recorder().step, Recorder().capture, "cpu", 1024).size_for(rows)
        assert size is not None
        assert rows <= size <= max(rows + 1, 1.5 * rows)


@pytest.mark.parametrize(("most", "largest"), [(1, 1), (5, 6), (960, 960), (961, 1024), (5000, 1024)])
def test_sizes_end_with_the_largest_batch_there_can_be(most: int, largest: int) -> None:
    graphs = Recorder().graphs(most)
    assert graphs.size_for(min(most, largest)) == largest
    assert graphs.size_for(largest + 1) is None


def test_a_batch_gets_its_own_rows_of_the_next_size() -> None:
    recorder = Recorder()
    logits = recorder.graphs()(*batch(9, 4, 7, 2, 8))
    assert logits is not None
    assert logits.tolist() == [[100 + slot, slot, 6] for slot in (9, 4, 7, 2, 8)]


def test_what_fills_has_no_slot() -> None:
    recorder = Recorder()
    graphs = recorder.graphs()
    graphs(*batch(1, 2, 3, 4, 5, 6))
    recorder.touched.clear()
    graphs(*batch(8, 9, 10, 11, 12))
    assert recorder.touched == {8, 9, 10, 11, 12, NO_SLOT}


def test_a_size_is_captured_once_and_before_any_slot_is_in_its_inputs() -> None:
    recorder = Recorder()
    graphs = recorder.graphs(most=8)
    for slots in ((1,), (2,), (1, 2, 3, 4, 5), (3,), (5, 4, 3, 2, 1, 0)):
        graphs(*batch(*slots))
    assert recorder.captured == [1, 6]
    # The largest first, for the buffers; then each capture and the replays.
    assert recorder.sizes_run == [8, 1, 1, 1, 6, 6, 1, 6]


def test_capturing_touches_no_state() -> None:
    recorder = Recorder()
    inputs = DecodeInputs.make(4, "cpu")
    recorder.step(inputs)
    assert recorder.touched == {NO_SLOT}
    assert inputs.rows.offsets.tolist() == [0, 1, 2, 3, 4]
    assert inputs.positions.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 3, 6, 960])
def test_inputs_begin_where_kernels_like_it(size: int) -> None:
    """Addresses of another alignment would make Triton compile every kernel once more."""
    inputs = DecodeInputs.make(size, "cpu")
    assert inputs.tokens.data_ptr() % 16 == inputs.rows.slots.data_ptr() % 16 == 0
    assert inputs.tokens.is_contiguous()
    assert inputs.rows.slots.is_contiguous()


def test_a_larger_batch_runs_eagerly() -> None:
    recorder = Recorder()
    assert recorder.graphs(most=4)(*batch(*range(5))) is None
    assert recorder.captured == []


def test_when_capturing_fails_decoding_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(fails_at=2)
    graphs = recorder.graphs()
    assert graphs(*batch(1)) is not None
    with caplog.at_level(logging.WARNING):
        assert graphs(*batch(1, 2)) is None
    assert "capturing a step of 2 rows failed (operation not permitted" in caplog.text
    assert graphs(*batch(1)) is None
    assert graphs(*batch(1, 2)) is None
    assert recorder.captured == [1]
