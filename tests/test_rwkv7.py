"""The forward: the golden answers, the rwkv package, and rows, chunks and neighbours that change no bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.checkpoints import ModelShape, make
from rwkv_lightning.core.checkpoint import Checkpoint
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.interfaces import Batch, LoadOptions, Model
from rwkv_lightning.core.rwkv7 import RWKV7
from rwkv_lightning.core.slots import SlotPool
from rwkv_lightning.kernels import recurrent
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend
from rwkv_lightning.plugins.backends.weights import CheckpointSource

DATA = Path(__file__).parent / "data"
ITEMS: list[dict[str, Any]] = json.loads((DATA / "golden.json").read_text())["items"]
PROMPTS: list[list[int]] = [item["prompt_ids"] for item in ITEMS]
NEAR_TIE = 0.3  # margin in float64 below which reduced precision may choose another token


@cache
def demo(dtype: str = "float32", state_dtype: str = "float32") -> Model:
    return Fp16Backend().load(demo_model_path(), LoadOptions(dtype=dtype, state_dtype=state_dtype))


def batch(rows: Sequence[Sequence[int]], slots: Sequence[int], positions: Sequence[int] | None = None) -> Batch:
    """Rows of tokens for these slots; logits after the last token of every row unless told otherwise."""
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    chosen = offsets[1:] - 1 if positions is None else torch.tensor(positions, dtype=torch.int64)
    return Batch(tokens, offsets.int(), torch.tensor(slots, dtype=torch.int32), chosen)


def feed(model: Model, pool: Any, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> torch.Tensor:
    return model.forward(batch(rows, slots), pool).clone()


def greedy(model: Model, prompts: Sequence[list[int]], counts: Sequence[int]) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits after the prompts, and counts[i] greedy tokens of each, all rows in one shared batch."""
    pool = model.new_states(len(prompts))
    logits = first = feed(model, pool, prompts, range(len(prompts)))
    rows = list(range(len(prompts)))
    answers: list[list[int]] = [[] for _ in prompts]
    while rows:
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            answers[row].append(token)
        rows = [row for row in rows if len(answers[row]) < counts[row]]
        if rows:
            logits = feed(model, pool, [[answers[row][-1]] for row in rows], rows)
    return first, answers


def same_state(pool: Any, slot: int, other: Any, other_slot: int) -> bool:
    a, b = pool.export(slot), other.export(other_slot)
    return torch.equal(a.shift, b.shift) and torch.equal(a.wkv, b.wkv)


class TestGolden:
    @pytest.mark.parametrize(
        ("dtype", "state_dtype", "bound", "least_margin"),
        [
            ("float32", "float32", 1e-4, 0.0),
            ("bfloat16", "float32", 2e-2, NEAR_TIE),
            ("bfloat16", "float16", 2e-2, NEAR_TIE),
        ],
    )
    def test_logits_and_greedy_answers(self, dtype: str, state_dtype: str, bound: float, least_margin: float) -> None:
        golden = load_file(DATA / "golden.safetensors")
        counts = [len(item["greedy_ids"]) for item in ITEMS]
        logits, answers = greedy(demo(dtype, state_dtype), PROMPTS, counts)
        for i, item in enumerate(ITEMS):
            expected = golden[f"{i:02}"]
            assert float((logits[i] - expected).norm() / expected.norm()) < bound, item["prompt"]
            margins = item["greedy_margins"]
            sure = next((n for n, margin in enumerate(margins) if margin < least_margin), len(margins))
            assert answers[i][:sure] == item["greedy_ids"][:sure], item["prompt"]


RWKV_PACKAGE = """
import sys, torch
from rwkv.model import RWKV
model = RWKV(sys.argv[1].removesuffix(".pth"), "cpu fp32")
logits = []
for row in torch.load(sys.argv[2]):
    out, state = model.forward(row, None)
    logits.append(out)
    for token in row[:3]:
        out, state = model.forward([token], state)
        logits.append(out)
torch.save(torch.stack(logits).float(), sys.argv[3])
"""


def logits_of_the_rwkv_package(path: Path, rows: list[list[int]], folder: Path) -> torch.Tensor:
    """Logits after each row, and after each of its first three tokens fed once more, one at a time."""
    torch.save(rows, folder / "rows.pt")
    arguments = [sys.executable, "-c", RWKV_PACKAGE, str(path), str(folder / "rows.pt"), str(folder / "logits.pt")]
    environment = os.environ | {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "logits.pt")  # type: ignore[no-any-return]


def own_logits(path: Path, rows: list[list[int]]) -> torch.Tensor:
    model = Fp16Backend().load(path, LoadOptions(dtype="float32"))
    logits = []
    for row in rows:
        pool = model.new_states(1)
        logits.append(feed(model, pool, [row], [0])[0])
        logits += [feed(model, pool, [[token]], [0])[0] for token in row[:3]]
    return torch.stack(logits)


SMALL = ModelShape(12, 768, 64, 64, 32, 128, vocab_size=512)
FULL = ModelShape(12, 768, 64, 64, 32, 128)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(None, id="demo"),
        pytest.param(SMALL, id="12x768"),
        pytest.param(FULL, id="12x768 with the World vocabulary", marks=pytest.mark.nightly),
    ],
)
def test_the_rwkv_package_gives_the_same_logits(shape: ModelShape | None, tmp_path: Path) -> None:
    if shape is None:
        path, rows = demo_model_path(), [prompt for prompt in PROMPTS if 3 <= len(prompt) < 40][:5]
    else:
        path = make(tmp_path / "model.pth", shape, seed=3)
        rows = [[(7 * i + 3) % shape.vocab_size for i in range(length)] for length in (3, 17)]
    expected = logits_of_the_rwkv_package(path, rows, tmp_path)
    got = own_logits(path, rows)
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < 1e-5


class TestRows:
    """What a row gives depends on its own tokens and state alone, bit for bit."""

    LONG = PROMPTS[0]

    @pytest.mark.parametrize("count", [2, 7, 64, 960])
    @pytest.mark.parametrize(("dtype", "state_dtype"), [("float32", "float32"), ("bfloat16", "float16")])
    def test_the_number_of_rows_changes_no_bit(self, dtype: str, state_dtype: str, count: int) -> None:
        model = demo(dtype, state_dtype)
        pool, alone = model.new_states(count), model.new_states(1)
        for step in range(3):
            rows = [[1 + (step * 31 + row * 17) % 3000] for row in range(count)]
            together = feed(model, pool, rows, range(count))
            assert torch.equal(feed(model, alone, rows[:1], [0])[0], together[0])
        assert same_state(pool, 0, alone, 0)
        last = model.new_states(1)
        for step in range(3):
            logits = feed(model, last, [[1 + (step * 31 + (count - 1) * 17) % 3000]], [0])
        assert torch.equal(logits[0], together[-1])

    @pytest.mark.parametrize(("dtype", "state_dtype"), [("float32", "float32"), ("bfloat16", "float16")])
    def test_a_ragged_batch_is_its_rows(self, dtype: str, state_dtype: str) -> None:
        model = demo(dtype, state_dtype)
        prompts = [prompt for prompt in PROMPTS if len(prompt) < 60][:9]
        slots = [8, 3, 5, 0, 1, 7, 2, 6, 4]
        pool = model.new_states(9)
        together = feed(model, pool, prompts, slots)
        for prompt, slot, logits in zip(prompts, slots, together, strict=True):
            alone = model.new_states(1)
            assert torch.equal(feed(model, alone, [prompt], [0])[0], logits)
            assert same_state(pool, slot, alone, 0)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_chunks_cut_anywhere_change_no_bit(self, dtype: str) -> None:
        model = demo(dtype)
        whole = model.new_states(1)
        expected = feed(model, whole, [self.LONG], [0])
        for cut in range(1, len(self.LONG)):
            pool = model.new_states(1)
            feed(model, pool, [self.LONG[:cut]], [0])
            assert torch.equal(feed(model, pool, [self.LONG[cut:]], [0]), expected)
            assert same_state(pool, 0, whole, 0)

    def test_token_by_token_changes_no_bit(self) -> None:
        model = demo()
        whole, single = model.new_states(1), model.new_states(1)
        for token in self.LONG:
            logits = feed(model, single, [[token]], [0])
        assert torch.equal(logits, feed(model, whole, [self.LONG], [0]))
        assert same_state(single, 0, whole, 0)

    def test_chunks_in_float16_states_stay_close(self) -> None:
        model = demo("bfloat16", "float16")
        expected = feed(model, model.new_states(1), [self.LONG], [0])
        for cut in range(1, len(self.LONG), 5):
            pool = model.new_states(1)
            feed(model, pool, [self.LONG[:cut]], [0])
            got = feed(model, pool, [self.LONG[cut:]], [0])
            assert float((got - expected).norm() / expected.norm()) < 2e-2

    def test_prefill_and_decode_share_a_batch(self) -> None:
        model = demo()
        apart, shared = model.new_states(3), model.new_states(3)
        for pool in (apart, shared):
            feed(model, pool, [PROMPTS[1]], [1])
        decoded, prefilled, started = (
            feed(model, apart, [row], [slot]) for row, slot in (([9], 1), (PROMPTS[2], 2), ([5], 0))
        )
        logits = feed(model, shared, [[9], PROMPTS[2], [5]], [1, 2, 0])
        assert torch.equal(logits, torch.cat((decoded, prefilled, started)))
        assert all(same_state(apart, slot, shared, slot) for slot in range(3))

    def test_other_slots_are_untouched(self) -> None:
        model = demo("bfloat16", "float16")
        pool = model.new_states(4)
        feed(model, pool, [PROMPTS[1]], [2])
        before = [pool.export(slot) for slot in range(4)]
        feed(model, pool, [PROMPTS[0], [7]], [3, 0])
        for slot in (1, 2):
            after = pool.export(slot)
            assert torch.equal(after.shift, before[slot].shift)
            assert torch.equal(after.wkv, before[slot].wkv)


class TestStates:
    @pytest.mark.parametrize("state_dtype", ["float32", "float16"])
    def test_a_snapshot_continues_in_another_slot_as_if_nothing_had_happened(self, state_dtype: str) -> None:
        model = demo("bfloat16", state_dtype)
        pool = model.new_states(3)
        feed(model, pool, [PROMPTS[0]], [0])
        snapshot = pool.export(0)
        expected = feed(model, pool, [[5, 6, 7]], [0])
        feed(model, pool, [PROMPTS[1]], [2])
        pool.restore(2, snapshot)
        assert torch.equal(feed(model, pool, [[5, 6, 7]], [2]), expected)
        assert same_state(pool, 0, pool, 2)

    def test_a_copy_goes_its_own_way(self) -> None:
        model = demo()
        pool = model.new_states(3)
        feed(model, pool, [PROMPTS[0]], [0])
        pool.copy([(0, 1), (0, 2)])
        logits = feed(model, pool, [[5], [6], [5]], [0, 1, 2])
        assert torch.equal(logits[0], logits[2])
        assert not torch.equal(logits[0], logits[1])

    @pytest.mark.parametrize("state_dtype", ["float32", "float16"])
    def test_a_state_has_the_size_that_is_announced(self, state_dtype: str) -> None:
        model = demo("bfloat16", state_dtype)
        pool = model.new_states(2)
        assert isinstance(pool, SlotPool)
        assert model.state_nbytes() == pool.nbytes_per_slot == pool.export(1).nbytes


class TestLogits:
    def test_they_come_where_they_are_wanted_in_the_order_wanted(self) -> None:
        model = demo()
        tokens = PROMPTS[0][:6]
        single = model.new_states(1)
        each = [feed(model, single, [[token]], [0])[0] for token in tokens]
        logits = model.forward(batch([tokens], [0], [4, 0, 4, 2]), model.new_states(1))
        assert logits.dtype == torch.float32
        assert torch.equal(logits, torch.stack([each[4], each[0], each[4], each[2]]))

    def test_none_may_be_wanted(self) -> None:
        model = demo()
        quiet, loud = model.new_states(1), model.new_states(1)
        logits = model.forward(batch([PROMPTS[0]], [0], []), quiet)
        feed(model, loud, [PROMPTS[0]], [0])
        assert logits.shape == (0, model.config.vocab_size)
        assert same_state(quiet, 0, loud, 0)

    def test_decoding_reuses_one_buffer(self) -> None:
        model = demo()
        pool = model.new_states(4)
        addresses = {model.forward(batch([[3]] * 4, range(4)), pool).data_ptr() for _ in range(3)}
        assert len(addresses) == 1

    def test_buffers_grow_and_shrink_with_the_step(self) -> None:
        """Whatever sizes came before, a step gives the same."""
        model = Fp16Backend().load(demo_model_path(), LoadOptions(dtype="float32"))
        expected = feed(model, model.new_states(1), [PROMPTS[0]], [0])
        for count in (1, 300, 2, 40):
            feed(model, model.new_states(count), [[row + 1] for row in range(count)], range(count))
            assert torch.equal(feed(model, model.new_states(1), [PROMPTS[0]], [0]), expected)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": [1, 2, 3660]}, r"tokens must lie in 0\.\.3659"),
        ({"tokens": [-1, 2, 3]}, r"tokens must lie in 0\.\.3659"),
        ({"slots": [0, 2]}, r"slots must lie in 0\.\.1"),
        ({"slots": [-1, 0]}, r"slots must lie in 0\.\.1"),
        ({"slots": [1, 1]}, r"slots \[1, 1\] must be distinct"),
        ({"slots": [1]}, "do not cut 3 tokens into 1 rows"),
        ({"offsets": [0, 2, 4]}, "do not cut 3 tokens into 2 rows"),
        ({"offsets": [0, 0, 3]}, "do not cut 3 tokens into 2 rows"),
        ({"offsets": [1, 2, 3]}, "do not cut 3 tokens into 2 rows"),
        ({"offsets": [0], "slots": []}, "do not cut 3 tokens into 0 rows"),
        ({"logit_positions": [3]}, r"logit_positions must lie in 0\.\.2"),
        ({"logit_positions": [-1]}, r"logit_positions must lie in 0\.\.2"),
    ],
)
def test_a_batch_out_of_range_is_refused_before_anything_changes(change: dict[str, list[int]], why: str) -> None:
    model = demo()
    good = {"tokens": [1, 2, 3], "offsets": [0, 2, 3], "slots": [0, 1], "logit_positions": [1, 2]} | change
    wide = {"logit_positions"}
    tensors = {key: torch.tensor(v, dtype=torch.int64 if key in wide else torch.int32) for key, v in good.items()}
    pool = model.new_states(2)
    with pytest.raises(ValueError, match=why):
        model.forward(Batch(**tensors), pool)
    assert not pool.export(0).shift.any()
    assert not pool.export(1).wkv.any()


class PluginLinear:
    """An operator as a plugin may write it, by the protocol alone."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight

    def __call__(self, x: torch.Tensor, activation: str = "none", dtype: torch.dtype | None = None) -> torch.Tensor:
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "none": lambda y: y,
            "relu2": lambda y: y.relu().square(),
            "tanh": torch.tanh,
            "sigmoid": torch.sigmoid,
        }
        return functions[activation](x @ self.weight.t()).to(dtype or x.dtype)


class PluginSource(CheckpointSource):
    """A plugin's weights: every matrix as a `PluginLinear`."""

    def linear(self, name: str) -> PluginLinear:
        weight = self._checkpoint.tensor(name).float()
        return PluginLinear(weight.t() if name[-2:] in ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2") else weight)


def load_plain(source: type[CheckpointSource]) -> RWKV7:
    given = source(Checkpoint.open(demo_model_path()), device=torch.device("cpu"), dtype=torch.float32)
    types = {"dtype": torch.float32, "state_dtype": torch.float32}
    return RWKV7(given, device="cpu", **types, description="plain")


class TestParts:
    """The forward is written over what a backend and the kernels' choice supply."""

    def difference(self, model: Model) -> float:
        rows, slots = [PROMPTS[0], [5], PROMPTS[1]], [2, 0, 1]
        expected, got = (feed(one, one.new_states(3), rows, slots) for one in (demo(), model))
        return float((got - expected).norm() / expected.norm())

    def test_operators_of_a_plugin_serve(self) -> None:
        assert self.difference(load_plain(PluginSource)) < 1e-5

    def test_the_reference_kernels_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reference = recurrent.select("meta")
        monkeypatch.setattr(recurrent, "select", lambda device: reference)
        model = load_plain(CheckpointSource)
        assert model.description == "plain; recurrence: PyTorch reference on meta"
        assert self.difference(model) < 1e-5

    def test_it_describes_itself(self) -> None:
        model = demo("bfloat16", "float16")
        assert isinstance(model, Model)
        assert (model.dtype, model.device) == ("bfloat16", "cpu")
        assert model.description.endswith(f"recurrence: {recurrent.select('cpu').why}")
