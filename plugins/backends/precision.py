"""Which types a model computes in and keeps its states in, and why."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.core.errors import StartError
from rwkv_lightning.kernels.linear import make_linear

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import Linear, LoadOptions

COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATES = {"float32": torch.float32, "float16": torch.float16}
MARGIN = 1.1  # bfloat16 gives up precision, so it must be faster than float32 by this factor
MEASURED_MATRIX = (2048, 1024)  # [N, K]
MEASURED_ROWS = (1, 64)  # decoding one sequence, and a batch
REPEATS = 6


@dataclass(frozen=True)
class Precision:
    """The compute type, the type of the resident states, and a clause for the banner."""

    dtype: torch.dtype
    state_dtype: torch.dtype
    why: str


def choose_precision(options: LoadOptions) -> Precision:
    """Settle `dtype` and `state_dtype`. Raises StartError for a choice that cannot serve, naming one that can."""
    dtype, why = _compute_type(options)
    state_dtype = _state_type(options, dtype)
    return Precision(dtype, state_dtype, f"{why}, {_name(state_dtype)} states")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compute_type(options: LoadOptions) -> tuple[torch.dtype, str]:
    on_cpu = torch.device(options.device).type == "cpu"
    if options.dtype == "auto":
        return _faster_on_cpu() if on_cpu else (torch.float16, "float16")
    if options.dtype not in COMPUTE:
        raise StartError(f"--dtype {options.dtype} is unknown: choose auto, {', '.join(COMPUTE)}")
    if on_cpu and options.dtype == "float16":
        raise StartError(
            "--dtype float16 is not usable on a CPU, where its matrix products are 10 to 40 times slower: "
            "choose --dtype bfloat16 or --dtype float32"
        )
    return COMPUTE[options.dtype], options.dtype


def _state_type(options: LoadOptions, dtype: torch.dtype) -> torch.dtype:
    if options.state_dtype == "auto":
        return torch.float32 if options.deterministic or dtype == torch.float32 else torch.float16
    if options.state_dtype not in STATES:
        raise StartError(f"--state-dtype {options.state_dtype} is unknown: choose auto, {', '.join(STATES)}")
    if options.deterministic and options.state_dtype == "float16":
        raise StartError(
            "--state-dtype float16 rounds a state at the end of every chunk, so that --deterministic cannot hold: "
            "choose --state-dtype float32"
        )
    return STATES[options.state_dtype]


def _faster_on_cpu() -> tuple[torch.dtype, str]:
    gain = bfloat16_gain()
    if gain >= MARGIN:
        return torch.bfloat16, f"bfloat16 (measured {gain:.1f} times as fast as float32)"
    return torch.float32, f"float32 (bfloat16 measured {gain:.1f} times as fast)"


@functools.cache
def bfloat16_gain() -> float:
    """How many times faster bfloat16 is than float32 on one core here: the geometric mean over one row and a batch.

    Takes some tens of milliseconds, once per process.
    """
    weight = torch.randn(MEASURED_MATRIX, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        linears = {dtype: make_linear(weight, dtype) for dtype in (torch.float32, torch.bfloat16)}
        gains = [_gain(linears, torch.ones(rows, weight.shape[1])) for rows in MEASURED_ROWS]
    finally:
        torch.set_num_threads(threads)
    return statistics.geometric_mean(gains)


def _gain(linears: Mapping[torch.dtype, Linear], x: torch.Tensor) -> float:
    best = dict.fromkeys(linears, float("inf"))
    inputs = {dtype: x.to(dtype) for dtype in linears}
    for _ in range(REPEATS):  # interleaved, so that a busy moment hits both
        for dtype, linear in linears.items():
            best[dtype] = min(best[dtype], _seconds(functools.partial(linear, inputs[dtype])))
    return best[torch.float32] / best[torch.bfloat16]


def _seconds(call: Callable[[], object]) -> float:
    """Of this thread on a processor: waiting for other processes does not count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start
