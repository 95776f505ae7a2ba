"""Copies that no step waits for, on a simulated GPU whose streams run as late, or as far ahead, as they are allowed to.

It stands in for `torch.cuda`: work is put into streams and runs when somebody waits for it; memory that is dropped is
overwritten as soon as the allocator might hand it out again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rwkv_lightning.core.slots import Snapshot
from rwkv_lightning.kernels.triton import transfers
from rwkv_lightning.kernels.triton.transfers import ALIGNMENT, StateTransfers, page_locked, upload

JUNK = -1.0
DEVICE = "cuda:1"


class Stream:
    """Work in order; `run` carries the first `count` pieces out."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def put(self, piece: Callable[[], object]) -> None:
        self.work.append(piece)

    def run(self, count: int | None = None) -> None:
        while self.done < (len(self.work) if count is None else count):
            piece, self.done = self.work[self.done], self.done + 1
            piece()

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        count = len(other.work)
        self.put(lambda: other.run(count))

    def record_event(self, event: Event) -> None:
        event.place = self, len(self.work)


class Event:
    place: tuple[Stream, int]

    def __init__(self, blocking: bool = False) -> None:
        assert blocking, "a waiting thread would spin"

    def synchronize(self) -> None:
        stream, count = self.place
        stream.run(count)


class Gpu:
    """What `StateTransfers` takes `torch.cuda` for."""

    Event = Event

    def __init__(self) -> None:
        self.steps = self.current = Stream()
        self.side: Stream | None = None
        self.chosen: str | None = None

    def Stream(self, priority: int) -> Stream:
        assert self.chosen == DEVICE
        assert priority != 0, "captures take their streams from that pool"
        self.side = Stream()
        return self.side

    def current_stream(self) -> Stream:
        assert self.chosen == DEVICE
        return self.current

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.chosen, before = str(device), self.chosen
        yield
        self.chosen = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def tensor(self, data: torch.Tensor) -> OnGpu:
        return OnGpu(self, data.clone())


class OnGpu:
    """A tensor of the simulated GPU. Once dropped, its memory goes to whom its streams let have it."""

    def __init__(self, gpu: Gpu, data: torch.Tensor) -> None:
        self.gpu, self.data = gpu, data
        self.shape, self.dtype = data.shape, data.dtype
        self.streams = [gpu.current]
        weakref.finalize(self, _reuse, data, self.streams)

    def clone(self, memory_format: torch.memory_format) -> OnGpu:
        assert memory_format is torch.contiguous_format
        made, source = OnGpu(self.gpu, torch.full(self.shape, JUNK)), self.data
        data = made.data  # not `made`: work that is under way keeps no tensor
        self.gpu.current.put(lambda: data.copy_(source))
        return made

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


def _reuse(data: torch.Tensor, streams: list[Stream]) -> None:
    streams[-1].put(lambda: data.fill_(JUNK))
    if len(streams) == 1:
        streams[0].run()  # nobody knows of a reader on another stream


class OnHost:
    """Page-locked memory, or the ordinary one."""

    def __init__(self, gpu: Gpu, data: torch.Tensor, *, pinned: bool = True) -> None:
        self.gpu, self.data, self.pinned = gpu, data, pinned
        self.nbytes = data.nbytes

    def is_pinned(self) -> bool:
        return self.pinned

    def copy_(self, source: OnGpu, non_blocking: bool) -> OnHost:
        assert non_blocking == self.pinned
        target, given = self.data, source.data
        self.gpu.current.put(lambda: target.copy_(given))
        if not non_blocking:
            self.gpu.current.run()
        return self

    def to(self, device: torch.device, non_blocking: bool) -> OnGpu:
        assert (str(device), non_blocking) == (DEVICE, self.pinned)
        made = OnGpu(self.gpu, torch.full(self.data.shape, JUNK))
        self.gpu.current.put(lambda: made.data.copy_(self.data))
        return made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(transfers, "page_locked", lambda shape, dtype: OnHost(made, torch.full(shape, JUNK)))
    return made


class World:
    """A slot that steps count up, and its way to the host."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.transfers = StateTransfers(DEVICE, gpu)
        self.slot = gpu.tensor(torch.zeros(3))

    def step(self) -> None:
        self.gpu.steps.put(lambda: self.slot.data.add_(1))

    def export(self) -> Snapshot:
        hosts, arrival = self.transfers.to_host([self.slot, self.slot])  # type: ignore[list-item]
        return Snapshot(*hosts, arrival)

    def restored(self, snapshot: Snapshot) -> OnGpu:
        given, arrival = snapshot.pending
        made: Any = self.transfers.to_device(given, arrival)[1]
        return made  # type: ignore[no-any-return]


def numbers(snapshot: Snapshot) -> set[float]:
    """What a snapshot holds, read on the host."""
    both: Any = snapshot.to_tensors().values()
    return {value for each in both for value in each.data.tolist()}


@pytest.mark.parametrize("first", ["steps", "copies", "nothing"])
def test_a_copy_is_of_its_moment_however_far_the_steps_have_gone(gpu: Gpu, first: str) -> None:
    world = World(gpu)
    world.step()
    world.step()
    snapshot = world.export()
    world.step()
    if first == "steps":
        gpu.steps.run()
    elif first == "copies" and gpu.side is not None:
        gpu.side.run()
    assert numbers(snapshot) == {2}
    gpu.steps.run()
    assert world.slot.data.tolist() == [3, 3, 3]
    assert numbers(snapshot) == {2}


def test_nobody_waits_before_somebody_reads(gpu: Gpu) -> None:
    world = World(gpu)
    world.step()
    snapshot = world.export()
    assert snapshot.nbytes == 2 * 3 * 4
    world.restored(snapshot)
    assert gpu.steps.done == 0
    assert gpu.side is not None
    assert gpu.side.done == 0
    assert numbers(snapshot) == {1}


def test_reading_waits_for_no_later_step(gpu: Gpu) -> None:
    world = World(gpu)
    world.step()
    snapshot = world.export()
    world.step()
    assert numbers(snapshot) == {1}
    assert world.slot.data.tolist() == [1, 1, 1]


def test_what_comes_back_before_it_has_arrived_is_waited_for_on_the_device(gpu: Gpu) -> None:
    world = World(gpu)
    world.step()
    snapshot = world.export()
    world.step()
    there = world.restored(snapshot)
    gpu.steps.run()
    assert there.data.tolist() == [1, 1, 1]


def test_copies_keep_their_order(gpu: Gpu) -> None:
    """Each is of its own moment, though all of them take one way."""
    world = World(gpu)
    snapshots = []
    for _ in range(4):
        world.step()
        snapshots.append(world.export())
    assert [numbers(snapshot) for snapshot in reversed(snapshots)] == [{4}, {3}, {2}, {1}]


def test_without_page_locked_memory_the_copy_is_made_at_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = lambda shape, dtype: OnHost(gpu, torch.full(shape, JUNK), pinned=False)  # noqa: E731
    monkeypatch.setattr(transfers, "page_locked", ordinary)
    world = World(gpu)
    world.step()
    snapshot = world.export()
    assert gpu.steps.done > 0
    assert numbers(snapshot) == {1}


def test_a_device_that_fails_is_told_to_whoever_reads() -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    snapshot = Snapshot(torch.zeros(1), torch.zeros(1), Broken())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            snapshot.to_tensors()


GIVEN = (
    torch.arange(5, dtype=torch.int32),
    torch.arange(3, dtype=torch.int64) - 7,
    torch.empty(0, dtype=torch.int32),
    torch.tensor([[0.5, -2.0], [1.5, 3.0]], dtype=torch.float64).t(),
    torch.tensor([9], dtype=torch.int32),
)


def test_small_inputs_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[torch.Tensor] = []

    def remembered(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        buffers.append(torch.full(shape, 255, dtype=dtype))
        return buffers[-1]

    monkeypatch.setattr(transfers, "page_locked", remembered)
    there = upload(GIVEN, "meta")
    (buffer,) = buffers
    assert all(each.device.type == "meta" and each.is_contiguous() for each in there)
    for view, given in zip(there, GIVEN, strict=True):
        begin = view.storage_offset() * view.itemsize
        assert begin % ALIGNMENT == 0
        assert torch.equal(buffer[begin : begin + given.nbytes].view(given.dtype).view(given.shape), given)


def test_on_a_cpu_nothing_is_copied() -> None:
    assert all(one is other for one, other in zip(upload(GIVEN, "cpu"), GIVEN, strict=True))


def test_memory_is_had_where_no_device_is() -> None:
    memory = page_locked((2, 3), torch.int32)
    assert (memory.shape, memory.dtype) == ((2, 3), torch.int32)
    assert memory.is_pinned() == torch.cuda.is_available()
