"""The operators of a GPU: the vendor's product in place, and the one that skips zeros."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DEVICE, INTERPRETED
from test_recurrent import noise, relative

from rwkv_lightning.kernels.linear import ACTIVATIONS, Activation, ReferenceLinear
from rwkv_lightning.kernels.triton.linear import TINY, DeviceLinear, SparseInputLinear, device_linear

DTYPE = torch.bfloat16 if INTERPRETED else torch.float16
ROUNDING = torch.finfo(DTYPE).eps


def sparse(rows: int, depth: int) -> torch.Tensor:
    """What squared ReLU leaves: mostly zeros."""
    return (noise(2, rows, depth) - 1.2).relu().square().to(DEVICE, DTYPE)


@pytest.mark.parametrize("rows", [1, TINY, TINY + 1])
@pytest.mark.parametrize(("columns", "depth"), [(40, 96), (130, 560)])
def test_skipping_zeros_changes_nothing(rows: int, columns: int, depth: int) -> None:
    x, weight = sparse(rows, depth), noise(1, columns, depth).to(DEVICE, DTYPE)
    linear = SparseInputLinear(weight, DTYPE, why="a test")
    out = torch.empty(rows, columns, dtype=DTYPE, device=DEVICE)
    assert linear(x, out=out) is out
    expected = x.double() @ weight.double().t()
    assert relative(out, expected) < ROUNDING
    assert torch.equal(linear(x), out)
    assert linear(x, dtype=torch.float32).dtype == torch.float32


def test_what_meets_zero_is_not_read() -> None:
    x, weight = sparse(1, 96), noise(1, 16, 96).to(DEVICE, DTYPE)
    expected = SparseInputLinear(weight, DTYPE, why="a test")(x)
    weight[:, x[0] == 0] = math.nan
    assert torch.equal(SparseInputLinear(weight, DTYPE, why="a test")(x), expected)


def test_rows_do_not_meet() -> None:
    x, linear = sparse(TINY, 96), SparseInputLinear(noise(1, 40, 96).to(DEVICE, DTYPE), DTYPE, why="a test")
    together = linear(x)
    for i in range(TINY):
        assert torch.equal(linear(x[i : i + 1]), together[i : i + 1])
    x[1, 5] = math.nan
    spoilt = linear(x)
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2, 3]], together[[0, 2, 3]])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_product_in_place_equals_the_reference(activation: Activation) -> None:
    x, weight = noise(3, 5, 64).to(DEVICE, DTYPE), noise(4, 48, 64, scale=0.2).to(DEVICE, DTYPE)
    out = torch.full((5, 48), math.nan, dtype=DTYPE, device=DEVICE)
    assert DeviceLinear(weight, DTYPE)(x, activation, out=out) is out
    assert relative(out, ReferenceLinear(weight, DTYPE)(x, activation)) < ROUNDING


def test_other_output_types_take_the_plain_way() -> None:
    x, weight = noise(3, 5, 64).to(DEVICE, DTYPE), noise(4, 48, 64).to(DEVICE, DTYPE)
    out = torch.empty(5, 48, device=DEVICE)
    linear = DeviceLinear(weight, DTYPE)
    assert linear(x, "none", torch.float32, out) is out
    assert torch.equal(out, ReferenceLinear(weight, DTYPE)(x, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"out has the shape \[4, 48\]"):
        linear(x, out=torch.empty(4, 48, dtype=DTYPE, device=DEVICE))


def test_the_input_says_which_operator_serves() -> None:
    weight = noise(1, 8, 32).to(DEVICE)
    assert type(device_linear(weight, DTYPE)) is DeviceLinear
    assert type(device_linear(weight, DTYPE, sparse_input=True)) is SparseInputLinear
