"""The whole forward over the kernels of a GPU: golden answers, and replayed steps against eager ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import DEVICE, INTERPRETED, NATIVE
from safetensors.torch import load_file
from test_rwkv7 import DATA, ITEMS, NEAR_TIE

from benchmarks.checkpoints import make
from rwkv_lightning.core import rwkv7
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.interfaces import Batch, LoadOptions, Model, SlotStates
from rwkv_lightning.kernels import recurrent
from rwkv_lightning.kernels.linear import KernelLinear, ReferenceLinear
from rwkv_lightning.kernels.triton import graphs
from rwkv_lightning.kernels.triton.graphs import Run
from rwkv_lightning.kernels.triton.linear import device_linear
from rwkv_lightning.kernels.triton.low_rank import pairs_of
from rwkv_lightning.plugins.backends import weights
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend

DTYPES = ["float32"] if INTERPRETED else ["float32", "float16", "bfloat16"]
BOUND = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
CHOSEN = [20] if INTERPRETED else list(range(len(ITEMS)))
ANSWERED = 2 if INTERPRETED else 48  # tokens
captured: list[Run] = []


def capture(run: Run) -> Run:
    """Where nothing can be captured, repeating the step stands for a replay."""
    captured.append(run)
    return run


def make_linear(weight: torch.Tensor, dtype: torch.dtype, *, deterministic: bool, sparse_input: bool) -> KernelLinear:
    """As on a GPU."""
    if deterministic:
        return ReferenceLinear(weight, dtype, deterministic=True)
    return device_linear(weight, dtype, sparse_input=sparse_input)


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the server would choose others."""
    captured.clear()
    if INTERPRETED:
        monkeypatch.setattr(recurrent, "select", lambda device: NATIVE)
        monkeypatch.setattr(graphs, "capture_for", lambda device: capture)


@pytest.fixture
def device_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the interpreter takes seconds for those of more than a small model."""
    if INTERPRETED:
        monkeypatch.setattr(weights, "make_linear", make_linear)
        monkeypatch.setattr(rwkv7, "pairs_for", lambda kind: pairs_of)


def load(path: Path, dtype: str = "float32", deterministic: bool = False) -> Model:
    return Fp16Backend().load(path, LoadOptions(DEVICE, dtype, "float32", deterministic))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers and two heads."""
    return make(tmp_path_factory.mktemp("models") / "tiny.safetensors", "tiny")


def feed(model: Model, states: SlotStates, rows: list[list[int]], slots: list[int]) -> torch.Tensor:
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    parts = tokens, offsets.int(), torch.tensor(slots, dtype=torch.int32), offsets[1:] - 1
    return model.forward(Batch(*parts), states).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_greedy_answers_are_golden(dtype: str) -> None:
    golden, model = load_file(DATA / "golden.safetensors"), load(demo_model_path(), dtype)
    states, rows = model.new_states(len(CHOSEN)), list(range(len(CHOSEN)))
    logits = feed(model, states, [ITEMS[i]["prompt_ids"] for i in CHOSEN], rows)
    for row, i in enumerate(CHOSEN):
        expected = golden[f"{i:02}"]
        assert float((logits[row] - expected).norm() / expected.norm()) < BOUND[dtype]
    answers: list[list[int]] = [[] for _ in CHOSEN]
    for _ in range(ANSWERED):
        for answer, token in zip(answers, logits.argmax(-1).tolist(), strict=True):
            answer.append(token)
        logits = feed(model, states, [[answer[-1]] for answer in answers], rows)
    least = 0.0 if dtype == "float32" else NEAR_TIE
    for answer, i in zip(answers, CHOSEN, strict=True):
        margins = ITEMS[i]["greedy_margins"][:ANSWERED]
        sure = next((n for n, margin in enumerate(margins) if margin < least), len(margins))
        assert answer[:sure] == ITEMS[i]["greedy_ids"][:sure]


@pytest.mark.usefixtures("device_linears")
def test_a_replayed_step_equals_an_eager_one(small: Path) -> None:
    """Five rows, filled up to six, and then five others; slots of nobody stay as they are.

    The eager step takes every low-rank pair by its operators, the replayed one all of them together.
    """
    model, eager = load(small), load(small, deterministic=True)
    states, expected = model.new_states(7), eager.new_states(7)
    for slots in ([6, 0, 3, 2, 5], [1, 2, 4, 6, 0]):
        rows = [[7 + slot] for slot in slots]
        got, wanted = feed(model, states, rows, slots), feed(eager, expected, rows, slots)
        assert float((got - wanted).norm() / wanted.norm()) < 1e-5
        for slot in range(7):
            a, b = states.export(slot), expected.export(slot)
            assert float((a.wkv - b.wkv).abs().max()) < 1e-4
            assert float((a.shift - b.shift).abs().max()) < 1e-4
    assert len(captured) == (1 if INTERPRETED else 0)


@pytest.mark.usefixtures("device_linears")
def test_other_steps_run_eagerly(small: Path) -> None:
    """Prompts, and rows of which no logits are wanted."""
    model = load(small)
    states = model.new_states(2)
    feed(model, states, [[5, 6], [7]], [0, 1])
    one, offsets = torch.tensor([3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    logits = model.forward(Batch(one, offsets, one - 3, torch.empty(0, dtype=torch.int64)), states)
    assert logits.shape == (0, model.config.vocab_size)
    assert captured == []
