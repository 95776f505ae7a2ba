"""What the tests of the gemlite and the cutlass engine share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rwkv_lightning.core import cli
from rwkv_lightning.core.convert import convert
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.interfaces import Batch, Model

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())["items"]
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
