"""States leave a GPU and come back beside its steps, bit for bit, and a step's inputs travel as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from cases import DEVICE, INTERPRETED
from test_slots import CONFIG as SMALL
from test_slots import COUNT as SLOTS
from test_slots import all_bits, bits, filled

from rwkv_lightning.core.interfaces import ModelConfig
from rwkv_lightning.core.slots import SlotPool
from rwkv_lightning.kernels.triton.graphs import NO_SLOT, DecodeInputs
from rwkv_lightning.kernels.triton.transfers import upload

SIZE = 64 if INTERPRETED else 4096
CONFIG = ModelConfig(n_layer=2, n_embd=SIZE, n_head=SIZE // 32, head_size=32, n_ffn=4 * SIZE, vocab_size=10)
COUNT = 6


@pytest.fixture
def pool() -> SlotPool:
    made = SlotPool(CONFIG, COUNT, dtype=torch.float16, device=DEVICE)
    made.shift.normal_()
    made.wkv.normal_()
    return made


def plain(pool: SlotPool, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A slot's numbers by a copy that is waited for."""
    return pool.shift[:, :, slot].to("cpu", copy=True), pool.wkv[:, slot].to("cpu", copy=True)


def same(pool: SlotPool, slot: int, expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(plain(pool, slot), expected, strict=True))


def busy() -> None:
    """Work for a few milliseconds, which the host does not wait for."""
    a = torch.ones(SIZE, SIZE, device=DEVICE)
    for _ in range(20):
        a = a @ a.t() / SIZE


def test_states_of_a_small_pool_have_the_bits_of_a_pool_on_the_host() -> None:
    host = filled(torch.float16)
    there = SlotPool(SMALL, SLOTS, dtype=torch.float16, device=DEVICE)
    for slot in range(SLOTS):
        there.restore(slot, host.export(slot))
    back = SlotPool(SMALL, SLOTS, dtype=torch.float16)
    for slot in range(SLOTS):
        back.restore(slot, there.export(slot))
    assert all_bits(back) == all_bits(host)


def test_a_snapshot_is_of_its_moment(pool: SlotPool) -> None:
    """The slot is overwritten while the copy waits behind other work; memory is wanted meanwhile."""
    expected = [plain(pool, slot) for slot in range(3)]
    for _ in range(5):
        busy()
        snapshots = [pool.export(slot) for slot in range(3)]
        pool.reset(range(3))
        others = [torch.full_like(pool.wkv[:, 0], 7) for _ in range(8)]
        for snapshot, (shift, wkv) in zip(snapshots, expected, strict=True):
            assert torch.equal(snapshot.shift, shift)
            assert torch.equal(snapshot.wkv, wkv)
        assert all(bool((each == 7).all()) for each in others)
        for slot, snapshot in enumerate(snapshots):
            pool.restore(slot, snapshot)
            assert same(pool, slot, expected[slot])


def test_a_snapshot_comes_back_before_it_has_arrived(pool: SlotPool) -> None:
    expected = plain(pool, 0)
    busy()
    snapshot = pool.export(0)
    pool.reset([0])
    pool.restore(1, snapshot)
    del snapshot  # its memory must stay until it has been read
    pool.restore(2, pool.export(1))
    assert same(pool, 1, expected)
    assert same(pool, 2, expected)


def test_other_threads_copy_beside_the_steps(pool: SlotPool) -> None:
    """One thread exports slots that no step touches, while this one goes on with others."""
    expected = [plain(pool, slot) for slot in (4, 5)]
    wrong: list[int] = []

    def copy() -> None:
        for _ in range(10):
            for index, slot in enumerate((4, 5)):
                snapshot = pool.export(slot)
                numbers = snapshot.shift, snapshot.wkv
                wrong.extend(0 for a, b in zip(numbers, expected[index], strict=True) if not torch.equal(a, b))

    thread = threading.Thread(target=copy)
    thread.start()
    while thread.is_alive():
        busy()
        pool.reset([0])
        pool.copy([(0, 1)])
        pool.restore(2, pool.export(3))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    thread.join()
    assert wrong == []


def test_nobody_waits_for_a_copy(pool: SlotPool) -> None:
    """Where there is a device, it is still at work when a state has been sent out and back."""
    pool.export(0).wait()  # page-locked memory is there from now on
    for _ in range(20):
        busy()
    snapshot = pool.export(0)
    pool.restore(1, snapshot)
    at_work = DEVICE == "cuda" and not torch.cuda.current_stream().query()
    assert at_work == (not INTERPRETED)
    assert snapshot.shift.is_pinned() == snapshot.wkv.is_pinned() == (not INTERPRETED)


def numbers() -> Iterator[torch.Tensor]:
    yield torch.arange(7, dtype=torch.int32)
    yield torch.arange(3, dtype=torch.int64)
    yield torch.empty(0, dtype=torch.int32)
    yield torch.randn(5, 3, dtype=torch.float64)


def test_inputs_arrive_as_they_are() -> None:
    for _ in range(50):  # in flight together, each from memory of its own
        given = list(numbers())
        for one, other in zip(upload(given, DEVICE), given, strict=True):
            assert one.device.type == DEVICE
            assert torch.equal(one.cpu(), other)


def test_replayed_inputs_follow_one_another() -> None:
    inputs = DecodeInputs.make(6, DEVICE)
    seen = []
    for count in (1, 6, 3, 5):
        busy()
        inputs.load(torch.arange(count, dtype=torch.int32) + count, torch.arange(count, dtype=torch.int32))
        seen.append((count, inputs.tokens.clone(), inputs.rows.slots.clone()))
    for count, tokens, slots in seen:
        assert tokens.tolist() == [*range(count, 2 * count)] + [0] * (6 - count)
        assert slots.tolist() == [*range(count)] + [NO_SLOT] * (6 - count)


def test_bits_are_read_from_any_device(pool: SlotPool) -> None:
    host = SlotPool(CONFIG, 1, dtype=torch.float16)
    host.restore(0, pool.export(3))
    assert bits(host, 0) == tuple(each.numpy().tobytes() for each in plain(pool, 3))
