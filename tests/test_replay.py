"""Steps of decoding that are recorded once and made again: the bits of the eager step, whatever happens in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from rwkv_lightning.core.convert import convert
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.interfaces import Activation, Batch, LoadOptions
from rwkv_lightning.core.replay import CpuSteps
from rwkv_lightning.core.rwkv7 import RWKV7
from rwkv_lightning.core.slots import SlotPool
from rwkv_lightning.core.workspace import Workspace
from rwkv_lightning.kernels.cpu.build import library
from rwkv_lightning.kernels.cpu.program import Kernel, Program, recorded
from rwkv_lightning.kernels.linear import BoundLinear, KernelLinear, LinearGroup, make_linear
from rwkv_lightning.kernels.recurrent import CppNormRows
from rwkv_lightning.kernels.reference import Rows
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend
from rwkv_lightning.plugins.backends.gemlite import GemliteBackend


@cache
def fp16(dtype: str, state_dtype: str) -> RWKV7:
    model = Fp16Backend().load(demo_model_path(), LoadOptions(dtype=dtype, state_dtype=state_dtype))
    assert isinstance(model, RWKV7)
    return model


@pytest.fixture(scope="module", params=["bfloat16", "float32", "int8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RWKV7:
    if request.param != "int8":
        return fp16(request.param, "float16" if request.param == "bfloat16" else "float32")
    path = tmp_path_factory.mktemp("int8") / "demo.safetensors"
    convert(demo_model_path(), "gemlite-int8", path)
    loaded = GemliteBackend().load(path, LoadOptions())
    assert isinstance(loaded, RWKV7)
    return loaded


class Beside:
    """One pool advanced by the model's forward, one by its eager step."""

    def __init__(self, model: RWKV7, slots: int) -> None:
        self.model = model
        self.pool, self.eager = model.new_states(slots), model.new_states(slots)
        self.recorded = 0

    def feed(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Feed both, and compare logits and states to the bit."""
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
        tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        batch = Batch(tokens, offsets.int(), torch.tensor(slots, dtype=torch.int32), offsets[1:] - 1)
        logits = self.model.forward(batch, self.pool).clone()
        structure = Rows(batch.offsets, batch.slots, len(tokens))
        expected = self.eager_logits(batch, structure)
        assert torch.equal(logits, expected)
        for slot in slots:
            assert same_state(self.pool, self.eager, slot)

    @torch.inference_mode()
    def eager_logits(self, batch: Batch, rows: Rows) -> torch.Tensor:
        workspace = Workspace(self.model.config.n_embd, getattr(torch, self.model.dtype), "cpu")
        return self.model.run(batch.tokens, rows, batch.logit_positions, self.eager, workspace)


def same_state(a: SlotPool, b: SlotPool, slot: int) -> bool:
    one, other = a.export(slot), b.export(slot)
    return torch.equal(one.shift, other.shift) and torch.equal(one.wkv, other.wkv)


@pytest.fixture
def records(model: RWKV7, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows whose steps were recorded."""
    assert isinstance(model._steps, CpuSteps)
    record = model._steps._record
    seen: list[int] = []

    def counted(*arguments: object) -> torch.Tensor:
        seen.append(len(arguments[1]))  # type: ignore[arg-type]
        return record(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model._steps, "_record", counted)
    return seen


def test_tokens_and_slots_are_those_of_the_call(model: RWKV7, records: list[int]) -> None:
    both = Beside(model, 6)
    for step in range(6):
        slots = [(step + i) % 6 for i in range(3)]
        both.feed([[7 + step * 11 + i] for i in range(3)], slots)
    assert records in ([3], [3, 3])  # the second time because the buffers grew while the first was recorded


def test_prompts_in_between_change_nothing(model: RWKV7) -> None:
    both = Beside(model, 4)
    both.feed([[3, 4, 5], [6]], [0, 1])
    for step in range(3):
        both.feed([[step + 9], [step + 5]], [0, 1])
        both.feed([[step + 1] * 40, [step + 2], [8] * 200], [0, 1, 3])  # larger buffers than before
    both.feed([[1], [2]], [1, 0])


def test_numbers_of_rows_take_turns(model: RWKV7) -> None:
    both = Beside(model, 20)
    for count in (1, 20, 2, 20, 1, 7, 20):
        both.feed([[count + i] for i in range(count)], list(range(count)))


def test_another_pool_is_another_recording(model: RWKV7) -> None:
    first, second = Beside(model, 2), Beside(model, 3)
    for token in (5, 6, 7):
        first.feed([[token]], [1])
        second.feed([[token + 1]], [2])


def test_the_number_of_threads_may_change(model: RWKV7) -> None:
    both, threads = Beside(model, 2), torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            both.feed([[5], [6]], [0, 1])
    finally:
        torch.set_num_threads(threads)


def test_errors_of_a_batch_change_nothing_and_are_found_every_time(model: RWKV7) -> None:
    both = Beside(model, 2)
    both.feed([[5], [6]], [0, 1])
    for slots in ([0, 2], [0, 0], [-1, 1]):
        with pytest.raises(ValueError, match="slots"):
            both.feed([[5], [6]], slots)
    both.feed([[5], [6]], [0, 1])


def test_buffers_that_were_replaced_by_larger_ones_are_let_go(model: RWKV7) -> None:
    both = Beside(model, 40)
    for count in range(1, 41, 3):
        both.feed([[count + i] for i in range(count)], list(range(count)))
    both.feed([[5]], [0])
    assert isinstance(model._steps, CpuSteps)
    assert all(step.buffers.current for step in model._steps._steps.values())


def test_a_table_of_another_type_is_looked_up(tmp_path: Path) -> None:
    weights = torch.load(demo_model_path(), weights_only=True)
    weights["emb.weight"] = weights["emb.weight"].double()
    torch.save(weights, path := tmp_path / "double.pth")
    wide = Fp16Backend().load(path, LoadOptions(dtype="float32", state_dtype="float32"))
    usual = fp16("float32", "float32")
    one = torch.ones(1, dtype=torch.int32)
    batch = Batch(one * 9, torch.tensor([0, 1], dtype=torch.int32), one - 1, torch.tensor([0]))
    assert torch.equal(wide.forward(batch, wide.new_states(1)), usual.forward(batch, usual.new_states(1)))


def test_a_plugins_kernels_cannot_be_recorded() -> None:
    linear = make_linear(torch.randn(32, 32), torch.float32)
    assert isinstance(linear, BoundLinear)
    assert LinearGroup([linear]).recordable

    class Runner:
        def run(self, tasks: bytes, count: int, threads: int) -> None:
            raise AssertionError("is not called here")

    linear.kernels = Runner()
    assert not LinearGroup([linear]).recordable


class Elsewhere(KernelLinear):
    """A plugin's operator, which no program can call."""

    def __init__(self, inner: KernelLinear) -> None:
        self.inner = inner
        self.out_features, self.in_features, self.dtype = inner.out_features, inner.in_features, inner.dtype
        self.why = "elsewhere"

    def __call__(
        self,
        x: torch.Tensor,
        activation: Activation = "none",
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.inner(x, activation, dtype, out)


def test_a_model_with_an_operator_of_another_kind_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    from rwkv_lightning.plugins.backends import weights

    def make(weight: torch.Tensor, *arguments: object, **options: object) -> KernelLinear:
        linear = usual(weight, *arguments, **options)  # type: ignore[arg-type]
        return Elsewhere(linear) if weight.shape[0] == weight.shape[1] else linear

    usual = weights.make_linear
    monkeypatch.setattr(weights, "make_linear", make)
    mixed = Fp16Backend().load(demo_model_path(), LoadOptions(dtype="float32"))
    assert isinstance(mixed, RWKV7)
    assert mixed._steps is None
    both = Beside(mixed, 2)
    for token in (5, 6):
        both.feed([[token], [token + 1]], [0, 1])


class TestProgram:
    def test_calls_of_other_threads_and_outside_are_not_recorded(self) -> None:
        model = fp16("float32", "float32")
        pool = model.new_states(1)
        one = torch.ones(1, dtype=torch.int32)
        batch = Batch(one, torch.tensor([0, 1], dtype=torch.int32), one - 1, torch.tensor([0]))
        with recorded() as calls:
            other = threading.Thread(target=eager, args=(model, batch, pool))
            other.start()
            other.join()
        assert calls == []
        with recorded() as mine:
            eager(model, batch, pool)
        eager(model, batch, pool)
        assert len(mine) == 3 + 8 * model.config.n_layer
        assert calls == []

    def test_a_program_makes_its_calls_in_order(self) -> None:
        lib = library().lib
        assert lib is not None
        model = fp16("float32", "float32")
        x = torch.randn(3, model.config.n_embd)
        out, again = torch.empty_like(x), torch.empty_like(x)
        norm = CppNormRows(torch.rand_like(x[0]), torch.rand_like(x[0]))
        with recorded() as calls:
            norm(x, None, None, out)
            norm(out, None, None, again)
        expected = again.clone()
        out.zero_()
        again.zero_()
        Program(lib, calls).run()
        assert torch.equal(again, expected)

    def test_only_known_functions_can_be_recorded(self) -> None:
        lib = library().lib
        assert lib is not None
        with pytest.raises(ValueError):
            Kernel(lib, "linear_pack", [])


def eager(model: RWKV7, batch: Batch, pool: SlotPool) -> None:
    workspace = Workspace(model.config.n_embd, torch.float32, "cpu")
    model.run(batch.tokens, Rows(batch.offsets, batch.slots, 1), batch.logit_positions, pool, workspace)
