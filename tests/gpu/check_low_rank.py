"""The low-rank pairs in two launches: the operators' own results, rows apart, and nothing read that is not theirs."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DEVICE, INTERPRETED
from test_recurrent import noise, relative

from rwkv_lightning.kernels.linear import Activation, ReferenceLinear
from rwkv_lightning.kernels.triton.linear import DeviceLinear, SparseInputLinear
from rwkv_lightning.kernels.triton.low_rank import MOST_ROWS, LowRankPairs, pairs_of

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS: list[Activation] = ["tanh", "none", "sigmoid", "none"]
SOURCES = [3, 4, 5, 2]
CASES = [(64, [16, 16, 32], MOST_ROWS), (200, [64, 40, 96, 32], 5), (576, [64, 64, 130, 32], 1)]
if not INTERPRETED:
    CASES += [(2048, [96, 96, 256, 64], 1), (4096, [128, 128, 480, 96], 7), (4096, [128, 128, 480], MOST_ROWS)]


class Case:
    """Weights of some pairs, and inputs for all of them."""

    def __init__(self, width: int, depths: list[int], rows: int, dtype: torch.dtype) -> None:
        count = len(depths)
        self.down = [noise(i, depth, width, scale=1 / math.sqrt(width)) for i, depth in enumerate(depths)]
        self.up = [noise(9 + i, width, depth, scale=1 / math.sqrt(depth)) for i, depth in enumerate(depths)]
        self.activations, self.sources = ACTIVATIONS[:count], SOURCES[:count]
        self.x = (noise(20, 6, rows, width) * 2).to(DEVICE, dtype)
        self.dtype = dtype
        self.operators = [[DeviceLinear(w.to(DEVICE), dtype) for w in half] for half in (self.down, self.up)]

    def pairs(self) -> LowRankPairs:
        made = pairs_of(*self.operators, self.activations, self.sources)
        assert made is not None
        return made

    def expected(self) -> list[torch.Tensor]:
        """One operator after the other."""
        results = []
        for one, two, activation, source in zip(self.down, self.up, self.activations, self.sources, strict=True):
            low = ReferenceLinear(one.to(DEVICE), self.dtype)(self.x[source], activation)
            results.append(ReferenceLinear(two.to(DEVICE), self.dtype)(low))
        return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "depths", "rows"), CASES)
def test_pairs_equal_their_operators(width: int, depths: list[int], rows: int, dtype: torch.dtype) -> None:
    case = Case(width, depths, rows, dtype)
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for got, wanted in zip(case.pairs()(case.x), case.expected(), strict=True):
        assert relative(got, wanted) < bound


def test_small_values_keep_their_digits() -> None:
    """tanh near 0, where a quotient of exponentials has none left."""
    case = Case(64, [16], 3, torch.float32)
    case.x *= 1e-4
    assert relative(case.pairs()(case.x)[0], case.expected()[0]) < 1e-5


def test_large_values_saturate() -> None:
    case = Case(64, [16, 16, 16], 3, torch.float32)
    case.x *= 1e4
    for got, wanted in zip(case.pairs()(case.x), case.expected(), strict=True):
        assert relative(got, wanted) < 1e-5


def test_rows_do_not_meet() -> None:
    case = Case(200, [64, 40, 96, 32], 4, torch.float16)
    pairs = case.pairs()
    together = [each.clone() for each in pairs(case.x)]
    for i in range(4):
        for alone, all_rows in zip(pairs(case.x[:, i : i + 1].contiguous()), together, strict=True):
            assert torch.equal(alone[0], all_rows[i])
    case.x[:, 1] = math.nan
    for spoilt, before in zip(pairs(case.x), together, strict=True):
        assert spoilt[1].isnan().all()
        assert torch.equal(spoilt[[0, 2, 3]], before[[0, 2, 3]])


def test_what_earlier_calls_left_is_not_read() -> None:
    case = Case(200, [64, 40], 2, torch.float16)
    pairs = case.pairs()
    expected = [each.clone() for each in pairs(case.x)]
    pairs(torch.full((6, MOST_ROWS, 200), math.nan, dtype=torch.float16, device=DEVICE))
    assert all(map(torch.equal, pairs(case.x), expected))


def test_the_operators_go_on_as_before() -> None:
    case = Case(200, [64, 40], 3, torch.float16)
    before = [linear(case.x[0]) for linear in case.operators[0]]
    case.pairs()
    assert all(map(torch.equal, (linear(case.x[0]) for linear in case.operators[0]), before))


def test_other_inputs_and_operators_are_refused() -> None:
    case = Case(64, [16, 16], 3, torch.float16)
    with pytest.raises(ValueError, match=r"x must be contiguous \[6, 16, 64\], not \[6, 17, 64\]"):
        case.pairs()(torch.zeros(6, MOST_ROWS + 1, 64, dtype=torch.float16, device=DEVICE))
    down, up = case.operators
    other = SparseInputLinear(case.up[0].to(DEVICE), torch.float16, why="a test")
    assert pairs_of(down, [other, up[1]], case.activations, case.sources) is None
    other_type = DeviceLinear(case.up[0].to(DEVICE), torch.float32)
    assert pairs_of(down, [other_type, up[1]], case.activations, case.sources) is None
