"""The sampling kernel on a GPU, with the signature of `sampling_reference.sample`.

Options and penalties go to the GPU as they lie in host memory, sparse and in one copy; the drawn ids come back in
another, which is the only wait. The draws are those of the reference but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from rwkv_lightning.kernels.sampling_advance import advance
from rwkv_lightning.kernels.sampling_rows import Row, RowState, Rule
from rwkv_lightning.kernels.triton.device import sampling as device
from rwkv_lightning.kernels.triton.launch import launch
from rwkv_lightning.kernels.triton.transfers import upload

ROWS_AT_ONCE = 128  # bounds the working memory: 20 bytes per row and token of the vocabulary
TILE = 1024


def sample(rule: Rule, logits: torch.Tensor, rows: Sequence[Row], exempt: Sequence[int] = ()) -> list[int]:
    """As `sampling.sample`: float32 logits [len(rows), V] -> token ids, -1 for a row without a largest finite logit."""
    if not rows:
        return []
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    drawn = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    memory = _Memory(min(len(rows), ROWS_AT_ONCE), logits.shape[1], logits.device)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        _draw(rule, logits[part], rows[part], memory, drawn[part])
    tokens: list[int] = drawn.tolist()
    advance(rule, rows, tokens, exempt)
    return tokens


class _Memory:
    """Working memory of some rows; see device/sampling.py."""

    def __init__(self, rows: int, vocabulary: int, where: torch.device) -> None:
        self.tile = min(TILE, max(16, triton.next_power_of_2(vocabulary)))
        self.padded = triton.cdiv(vocabulary, self.tile) * self.tile
        shape = rows, self.padded
        self.y = torch.empty(shape, dtype=torch.float64, device=where)
        self.w = torch.empty(shape, dtype=torch.float64, device=where)
        self.kept = torch.empty(shape, dtype=torch.int32, device=where)


def _draw(rule: Rule, logits: torch.Tensor, rows: Sequence[Row], memory: _Memory, drawn: torch.Tensor) -> None:
    numbers, *penalties = upload([torch.from_numpy(each) for each in _packed(rule, rows)], logits.device)
    arguments = (logits, logits.stride(0), logits.shape[1], memory.padded, numbers.view(torch.int64), numbers)
    working = memory.y, memory.w, memory.kept
    warps = 8 if memory.tile >= 1024 else 4
    options = {"RULE": int(rule), "BLOCK": memory.tile, "num_warps": warps, "enable_fp_fusion": False}
    launch(device.draw, (len(rows),), *arguments, *penalties, *working, drawn, **options)


def _packed(rule: Rule, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The rows' memory as float64 [rows, words], where each row's penalties start, their ids and their values."""
    memory = bytearray(b"".join([row.state for row in rows]))
    numbers = np.frombuffer(memory, np.float64).reshape(len(rows), -1)
    starts = np.zeros(len(rows) + 1, np.int32)
    if rule is Rule.TEMPERATURE:
        return numbers, starts, starts, numbers
    counts = np.frombuffer(memory, np.int32).reshape(len(rows), -1)[:, RowState.count.offset // 4]
    np.cumsum(counts, out=starts[1:])
    parts = [row.penalties() for row in rows]
    ids, values = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    if rule is Rule.V2:  # multiplied here, rounded as the reference rounds: ties must stay ties
        decay, frequency = (numbers[:, field.offset // 8] for field in (RowState.decay, RowState.frequency))
        with np.errstate(over="ignore"):
            values = np.repeat(frequency, counts) * (np.repeat(decay, counts) * values)
    return numbers, starts, ids, values
