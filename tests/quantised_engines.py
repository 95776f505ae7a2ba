"""What the tests of the gemlite and the cutlass engine share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoints import make
from rwkv_lightning.core import cli
from rwkv_lightning.core.convert import convert
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.interfaces import Batch, LoadOptions, Model
from rwkv_lightning.core.layout import MANIFEST
from rwkv_lightning.core.quantised_checkpoint import QuantisedCheckpoint
from rwkv_lightning.kernels import recurrent, reference
from rwkv_lightning.kernels.triton import graphs
from rwkv_lightning.kernels.triton.graphs import Run
from rwkv_lightning.plugins.backends.precision import Precision
from rwkv_lightning.plugins.backends.quantised_backend import Operators, load_model

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())["items"]
HALF = Precision(torch.float16, torch.float16, "float16")
NEAR_TIE = 0.3  # a margin between the two largest logits below which other weights may well choose otherwise


def converted_demo(folder: Path, target: str) -> Path:
    """The demo model, converted, with its vocabulary beside it."""
    out = folder / f"demo-{target}.safetensors"
    if not out.exists():
        convert(demo_model_path(), target, out)
    return out


def feed(model: Model, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [len(prompts), V] after the last token of each prompt, all in one ragged step from the zero state."""
    states = model.new_states(len(prompts))
    states.reset(range(len(prompts)))
    return step(model, states, prompts, range(len(prompts)))


def step(model: Model, states: Any, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> torch.Tensor:
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    return model.forward(Batch(tokens, offsets.int(), torch.tensor(slots).int(), offsets[1:] - 1), states).clone()


def golden_rate(model: Model) -> float:
    """The share of golden tokens that greedy decoding gives too, each answer up to its first near-tie or difference."""
    states = model.new_states(len(GOLDEN))
    states.reset(range(len(GOLDEN)))
    answers: list[list[int]] = [[] for _ in GOLDEN]
    rows = [item["prompt_ids"] for item in GOLDEN]
    for _ in range(max(len(item["greedy_ids"]) for item in GOLDEN)):
        for answer, token in zip(answers, step(model, states, rows, range(len(GOLDEN))).argmax(-1), strict=True):
            answer.append(int(token))
        rows = [answer[-1:] for answer in answers]
    right = wanted = 0
    for item, answer in zip(GOLDEN, answers, strict=True):
        margins = item["greedy_margins"]
        certain = next((i for i, margin in enumerate(margins) if margin < NEAR_TIE), len(margins))
        pairs = list(zip(answer, item["greedy_ids"], strict=False))[:certain]
        wanted += certain
        right += next((i for i, (ours, golden) in enumerate(pairs) if ours != golden), len(pairs))
    return right / wanted


def serve_refuses(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """`serve` ends with exit code 1 and this one sentence, before it opens a port."""
    assert cli.main(["serve", "--port", "0", "--state-store", "none", *options]) == 1
    shown = capsys.readouterr()
    lines = shown.err.strip().splitlines()
    assert "serves at" not in shown.err + shown.out
    assert lines[-1].startswith("rwkv-lightning: error: ")
    assert "Traceback" not in shown.err
    return lines[-1]


def damaged(path: Path, folder: Path, how: str) -> tuple[Path, str]:
    """A copy of a converted file with one thing wrong, and what a server must say of it."""
    out = folder / f"{how}.safetensors"
    out.with_suffix(".vocab.txt").write_bytes(path.with_suffix(".vocab.txt").read_bytes())
    content = path.read_bytes()
    if how == "truncated":
        out.write_bytes(content[:-1000])
        return out, "is truncated or damaged"
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    manifest = json.loads(header["__metadata__"][MANIFEST])
    change, expected = {
        "version": ({"version": 99}, "has version 99 of the converted format, but this server reads version 1"),
        "manifest": ({"group_size": 32}, "has a manifest that was changed after the conversion"),
        "weights": ({}, "holds other weights than its manifest says"),
    }[how]
    header["__metadata__"][MANIFEST] = json.dumps({**manifest, **change})
    tensors = bytearray(content[8 + size :])
    if how == "weights":
        for start in range(0, len(tensors), 64):
            tensors[start] ^= 1
    text = json.dumps(header).encode()
    out.write_bytes(len(text).to_bytes(8, "little") + text + tensors)
    return out, expected


DAMAGES = ("truncated", "version", "manifest", "weights")


@dataclass
class Recorder:
    """In the place of what captures a step on a GPU: the step is run again for every replay."""

    captured: list[int] = field(default_factory=list)

    def __call__(self, run: Run) -> Run:
        self.captured.append(len(run()))
        return run


def decode_by_replays(
    target: str, folder: Path, operators: Operators, monkeypatch: pytest.MonkeyPatch, deterministic: bool = False
) -> Recorder:
    """Decode a small random model as on a GPU, and check it against the same without captured steps.

    PyTorch's form of the recurrence stands for a GPU's: what fills a batch lands in its last slot, which nobody uses.
    """
    path = folder / f"small-{target}.safetensors"
    if not path.exists():
        convert(make(folder / f"small-{target}.pth", "tiny"), target, path)
    forms = recurrent.Kernels(reference.ShiftMix, reference.Wkv7, reference.NormRows, "PyTorch")
    monkeypatch.setattr(recurrent, "select", lambda device: forms)
    options = LoadOptions(deterministic=deterministic)
    eager = load_model(QuantisedCheckpoint.open(path), options, HALF, operators)
    recorder = Recorder()
    monkeypatch.setattr(graphs, "capture_for", lambda device: recorder)
    model = load_model(QuantisedCheckpoint.open(path), options, HALF, operators)
    states, expected = model.new_states(8), eager.new_states(8)
    for slots in ([6, 0, 3, 2, 5], [1, 2, 4], [1, 2, 4, 6, 0, 3]):
        for token in (7, 8):
            rows = [[token + slot] for slot in slots]
            assert torch.equal(step(model, states, rows, slots), step(eager, expected, rows, slots))
    return recorder


WITHOUT_COMPILER = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from rwkv_lightning.core.interfaces import LoadOptions
from rwkv_lightning.plugins.backends.{module} import {backend}
model = {backend}().load(Path(sys.argv[1]), LoadOptions(dtype="float32"))
print(model.description)
sys.path.insert(0, sys.argv[2])
from quantised_engines import feed
print(int(feed(model, [[2065, 59, 620, 1129, 1619, 785, 1326, 370, 64, 257, 1855, 2456, 59]]).isfinite().all()))
"""


def run_without_compiler(module: str, backend: str, model: Path, cache: Path) -> tuple[str, str]:
    """Load and run a model in a process that finds no compiler and no kernels; what it printed and logged."""
    env = {**os.environ, "PATH": "/nonexistent", "RWKV_LIGHTNING_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    env.pop("CXX", None)
    code = WITHOUT_COMPILER.format(module=module, backend=backend)
    command = [sys.executable, "-c", code, str(model), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
