"""Resident states: zeroing, copying, and snapshots that bring back every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from safetensors.torch import load, save

from rwkv_lightning.core.interfaces import ModelConfig, SlotStates
from rwkv_lightning.core.slots import SlotPool, Snapshot

CONFIG = ModelConfig(n_layer=3, n_embd=32, n_head=2, head_size=16, n_ffn=64, vocab_size=10)
COUNT = 5


@pytest.fixture(params=[torch.float32, torch.float16], ids=["float32", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def filled(dtype: torch.dtype, seed: int = 0) -> SlotPool:
    """A pool whose every slot holds other numbers, among them those that copying must not touch up."""
    pool = SlotPool(CONFIG, COUNT, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    pool.shift.normal_(generator=generator)
    pool.wkv.copy_(torch.randn(pool.wkv.shape, generator=generator))
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 6e-8], dtype=dtype)
    pool.wkv[..., :4] = odd
    return pool


def bits(pool: SlotPool, slot: int) -> tuple[bytes, bytes]:
    shift, wkv = pool.shift[:, :, slot].contiguous(), pool.wkv[:, slot].contiguous()
    return shift.numpy().tobytes(), wkv.numpy().tobytes()


def all_bits(pool: SlotPool) -> list[tuple[bytes, bytes]]:
    return [bits(pool, slot) for slot in range(pool.count)]


def test_it_is_what_the_runner_expects(dtype: torch.dtype) -> None:
    pool = SlotPool(CONFIG, COUNT, dtype=dtype)
    assert isinstance(pool, SlotStates)
    assert pool.count == COUNT
    assert pool.nbytes_per_slot == 3 * (2 * 32 * 4 + 2 * 16 * 16 * dtype.itemsize)
    assert not pool.shift.any()
    assert not pool.wkv.any()


def test_the_layers_views_are_the_states(dtype: torch.dtype) -> None:
    pool = SlotPool(CONFIG, COUNT, dtype=dtype)
    for index, layer in enumerate(pool.layers):
        layer.time_shift[1] = 1 + index
        layer.channel_shift[2] = 10 + index
        layer.wkv[3] = 20 + index
    layers = torch.arange(3)
    assert torch.equal(pool.shift[:, 0, 1, 0], 1.0 + layers)
    assert torch.equal(pool.shift[:, 1, 2, 0], 10.0 + layers)
    assert torch.equal(pool.wkv[:, 3, 1, 5, 7], (20.0 + layers).to(dtype))
    assert all(view.is_contiguous() for layer in pool.layers for view in layer)


def test_reset_zeroes_these_slots_and_no_other(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    before = all_bits(pool)
    pool.reset([1, 4])
    fresh = bits(SlotPool(CONFIG, 1, dtype=dtype), 0)
    assert all_bits(pool) == [before[0], fresh, before[2], before[3], fresh]


def test_copies_are_exact_and_touch_nothing_else(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    before = all_bits(pool)
    pool.copy([(0, 2), (0, 3), (4, 1)])
    assert all_bits(pool) == [before[0], before[4], before[0], before[0], before[4]]


def test_a_snapshot_brings_back_every_bit(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    before = all_bits(pool)
    snapshot = pool.export(2)
    pool.reset([2])
    pool.restore(2, snapshot)
    assert all_bits(pool) == before
    other = filled(dtype, seed=1)
    other.restore(0, snapshot)
    assert bits(other, 0) == before[2]


def test_a_snapshot_does_not_see_later_changes(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    snapshot = pool.export(0)
    expected = snapshot.shift.clone(), snapshot.wkv.clone()
    pool.reset([0])
    pool.restore(1, snapshot)
    pool.wkv[:, 1] = 7
    assert torch.equal(snapshot.shift, expected[0])
    assert torch.equal(snapshot.wkv.view(torch.uint8), expected[1].view(torch.uint8))


def test_a_snapshot_counts_its_bytes(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    assert pool.export(3).nbytes == pool.nbytes_per_slot


def test_snapshots_go_through_safetensors(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    before = all_bits(pool)
    stored = save(pool.export(3).to_tensors())
    tensors = load(stored)
    assert set(tensors) == {"shift", "wkv"}
    pool.reset([3])
    pool.restore(3, Snapshot.from_tensors(tensors))
    assert all_bits(pool) == before


def test_a_stored_state_without_a_part_is_refused(dtype: torch.dtype) -> None:
    tensors = filled(dtype).export(0).to_tensors()
    del tensors["wkv"]
    with pytest.raises(ValueError, match="lacks wkv"):
        Snapshot.from_tensors(tensors)


@pytest.mark.parametrize("slot", [-1, COUNT, 10**6])
def test_slots_out_of_range_are_refused_before_anything_changes(slot: int) -> None:
    pool = filled(torch.float32)
    before, snapshot = all_bits(pool), pool.export(0)
    calls: list[Callable[[], object]] = [
        lambda: pool.reset([0, slot]),
        lambda: pool.copy([(0, 1), (slot, 2)]),
        lambda: pool.copy([(0, 1), (2, slot)]),
        lambda: pool.export(slot),
        lambda: pool.restore(slot, snapshot),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"slot {slot} does not exist: there are {COUNT}"):
            call()
    assert all_bits(pool) == before


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([(0, 1), (2, 1)], "a destination is named twice"),
        ([(0, 1), (1, 2)], r"slots \[1\] are source and destination"),
        ([(3, 3)], r"slots \[3\] are source and destination"),
    ],
)
def test_ambiguous_copies_are_refused(pairs: list[tuple[int, int]], why: str) -> None:
    pool = filled(torch.float32)
    before = all_bits(pool)
    with pytest.raises(ValueError, match=why):
        pool.copy(pairs)
    assert all_bits(pool) == before


@pytest.mark.parametrize(
    ("config", "dtype", "why"),
    [
        (CONFIG, torch.float16, r"wkv of the snapshot is torch\.float16"),
        (ModelConfig(2, 32, 2, 16, 64, 10), torch.float32, r"shift of the snapshot .* another model"),
        (ModelConfig(3, 32, 1, 32, 64, 10), torch.float32, r"wkv of the snapshot .*\[3, 1, 32, 32\]"),
    ],
)
def test_a_state_of_another_form_is_refused(config: ModelConfig, dtype: torch.dtype, why: str) -> None:
    pool = filled(torch.float32)
    before = all_bits(pool)
    with pytest.raises(ValueError, match=why):
        pool.restore(0, SlotPool(config, 1, dtype=dtype).export(0))
    assert all_bits(pool) == before


def test_a_pool_must_make_sense() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        SlotPool(CONFIG, 0, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"float32 or float16, not torch\.bfloat16"):
        SlotPool(CONFIG, 1, dtype=torch.bfloat16)


class Late:
    """A device's transfers whose copies are on their way until somebody waits for them."""

    def __init__(self) -> None:
        self.waits = 0

    def to_host(self, views: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Late]:
        self.sources = [view.clone() for view in views]
        self.hosts = [torch.zeros_like(source) for source in self.sources]
        return self.hosts, self

    def synchronize(self) -> None:
        self.waits += 1
        for host, source in zip(self.hosts, self.sources, strict=True):
            host.copy_(source)

    def to_device(self, tensors: Sequence[torch.Tensor], arrival: Late | None) -> list[torch.Tensor]:
        if arrival is not None:  # the device waits, not the host
            arrival.synchronize()
            self.waits -= 1
        return [tensor.clone() for tensor in tensors]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> tuple[SlotPool, Late]:
    pool, transfers = filled(torch.float16), Late()
    monkeypatch.setattr(pool, "_transfers", transfers)
    return pool, transfers


def test_a_device_is_waited_for_by_those_who_read(late: tuple[SlotPool, Late]) -> None:
    pool, transfers = late
    before = bits(pool, 2)
    snapshot = pool.export(2)
    pool.reset([2])
    assert snapshot.nbytes == pool.nbytes_per_slot
    assert transfers.waits == 0
    tensors = snapshot.to_tensors()
    assert transfers.waits == 1
    assert before == (tensors["shift"].numpy().tobytes(), tensors["wkv"].numpy().tobytes())
    assert snapshot.to_tensors()["shift"] is tensors["shift"]
    assert transfers.waits == 1


def test_a_state_comes_back_to_a_device_without_being_waited_for(late: tuple[SlotPool, Late]) -> None:
    pool, transfers = late
    before = bits(pool, 2)
    snapshot = pool.export(2)
    pool.reset([2])
    pool.restore(4, snapshot)
    assert bits(pool, 4) == before
    assert transfers.waits == 0


def test_a_device_gives_its_states_to_a_pool_on_the_host(late: tuple[SlotPool, Late]) -> None:
    pool, transfers = late
    host = SlotPool(CONFIG, 1, dtype=torch.float16)
    host.restore(0, pool.export(3))
    assert bits(host, 0) == bits(pool, 3)
    assert transfers.waits == 1
