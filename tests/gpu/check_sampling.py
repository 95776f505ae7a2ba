"""The sampling kernel in Triton: the oracle's draws, rows apart, and the memory it shares with the other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import DEVICE, INTERPRETED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_cases import DEFAULTS, EXEMPT, IMPLEMENTATIONS, RULES, normal_logits
from test_samplers import test_a_bad_row_fails_alone_and_does_not_advance as check_bad_rows
from test_samplers import test_banned_tokens_are_never_drawn as check_banned_tokens
from test_sampling_rules import OPTIONS, TEMPERATURE, check_steps, small_rows

from rwkv_lightning.kernels import sampling as cpu_sampling
from rwkv_lightning.kernels.sampling import Row, Rule
from rwkv_lightning.kernels.triton import sampling

for check in (check_bad_rows, check_banned_tokens):
    check.__test__ = False  # type: ignore[attr-defined]
EXAMPLES = 10 if INTERPRETED else 300
QUIET = [HealthCheck.function_scoped_fixture]  # the tile is the same for all examples


def sample(rule: Rule, logits: torch.Tensor, rows: Sequence[Row], exempt: Sequence[int] = ()) -> list[int]:
    return sampling.sample(rule, logits.to(DEVICE), rows, exempt)


IMPLEMENTATIONS["triton"] = sample


@pytest.fixture(autouse=True)
def tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows then take the ways of long ones."""
    monkeypatch.setattr(sampling, "TILE", 32)


@settings(max_examples=EXAMPLES, suppress_health_check=QUIET, deadline=None)
@given(st.sampled_from(["V1", "V2"]), OPTIONS, small_rows(), st.integers(0, 2**64 - 1), st.integers(0, 4095))
def test_small_rows_match_the_oracle(rule: str, options: dict[str, Any], logits: torch.Tensor, seed: int, row: int):
    check_steps(rule, options, [logits] * 3, seed, row)


@settings(max_examples=EXAMPLES // 2, suppress_health_check=QUIET, deadline=None)
@given(TEMPERATURE, small_rows(), st.integers(0, 2**64 - 1))
def test_small_rows_by_temperature_match_the_oracle(value: float, logits: torch.Tensor, seed: int):
    check_steps("temperature", {"temperature": value}, [logits] * 3, seed, 0)


@pytest.mark.parametrize("rule", RULES)
def test_the_defaults_draw_as_the_other_kernels_do(rule: str, monkeypatch: pytest.MonkeyPatch):
    tile, size = (32, 150) if INTERPRETED else (1024, 65536)
    monkeypatch.setattr(sampling, "TILE", tile)
    drawn = check_steps(rule, DEFAULTS[rule], list(normal_logits(5, size, 2.5)), seed=9, row=3)
    assert len(drawn) == 5


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (40, 1.0), (3, 0.99)])
@pytest.mark.parametrize("rule", ["V1", "V2"])
def test_flat_rows_widen_the_search(rule: str, top_k: int, top_p: float):
    """Many equal values and a share that the first candidates do not reach."""
    logits = normal_logits(1, 150, 0.5).mul(4).round().div(4)[0]
    options = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "presence": 0.5, "frequency": 0.25}
    check_steps(rule, options, [logits] * 3, seed=2, row=1)


@pytest.mark.parametrize("rule", [Rule.V1, Rule.V2, Rule.TEMPERATURE])
def test_a_bad_row_fails_alone(rule: Rule):
    check_bad_rows(rule, {"temperature": 0.0 if rule is Rule.V2 else 1.0}, sample)


def test_a_row_draws_the_same_alone_and_in_a_crowd(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampling, "ROWS_AT_ONCE", 3)
    logits = normal_logits(5, 60, 2.0)
    crowd = sample(Rule.V1, logits, [Row(5, i, **DEFAULTS["V1"]) for i in range(5)])
    assert crowd == [sample(Rule.V1, logits[i : i + 1], [Row(5, i, **DEFAULTS["V1"])])[0] for i in range(5)]


@pytest.mark.parametrize("rule", RULES)
def test_the_rows_memory_is_that_of_the_other_kernels(rule: str):
    """Thirty-four tokens outgrow the first capacity of 32."""
    options = DEFAULTS[rule] | {"temperature": 0.0} | ({} if rule == "temperature" else {"presence": 50.0})
    rows = [Row(1, 0, **options) for _ in range(2)]
    logits = normal_logits(1, 40, 1.0)
    for _ in range(34):
        tokens = sample(RULES[rule], logits, rows[:1], EXEMPT)
        assert tokens == cpu_sampling.sample(RULES[rule], logits, rows[1:], EXEMPT)
    (ids, values), (other_ids, other_values) = rows[0].penalties(), rows[1].penalties()
    assert rows[0].state.position == rows[1].state.position == 34
    assert np.array_equal(ids, other_ids)
    assert np.array_equal(values, other_values)


def test_no_rows_and_strided_logits():
    assert sample(Rule.V1, torch.zeros(0, 10), []) == []
    turned = normal_logits(2, 50, 3.0).t().contiguous().t()
    rows = [[Row(1, i, temperature=1.0) for i in range(2)] for _ in range(2)]
    assert sample(Rule.V1, turned, rows[0]) == sample(Rule.V1, turned.contiguous(), rows[1])


def test_logits_stay_as_they_were():
    logits = normal_logits(1, 40, 3.0).to(DEVICE)
    before, row = logits.clone(), Row(1, 0, **DEFAULTS["V2"])
    for _ in range(2):
        sampling.sample(Rule.V2, logits, [row])
    assert torch.equal(logits, before)
