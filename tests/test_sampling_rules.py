"""The sampling rules, kernel and reference, against the NumPy oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import DEFAULTS, EXEMPT, IMPLEMENTATIONS, RULES, normal_logits
from sampling_oracle import OracleRow

from rwkv_lightning.kernels import sampling
from rwkv_lightning.kernels.sampling import Row, Rule


def check_steps(rule: str, options: dict[str, Any], steps: list[torch.Tensor], seed: int, row: int) -> list[int]:
    """Draw with both implementations, step by step, and compare each draw with the oracle's. Returns the ids."""
    oracle = OracleRow(rule, steps[0].numel(), **options, seed=seed, row=row, exempt=EXEMPT)
    rows = {name: Row(seed, row, **options) for name in IMPLEMENTATIONS}
    drawn = []
    for logits in steps:
        choices = oracle.choices(logits.numpy())
        tokens = {name: sample(RULES[rule], logits[None], [rows[name]], EXEMPT)[0] for name, sample in
                  IMPLEMENTATIONS.items()}  # fmt: skip
        assert set(tokens.values()) <= choices, (tokens, choices, oracle.position)
        if len(set(tokens.values())) > 1:
            break  # a draw on a boundary, within rounding: the rows part here
        drawn.append(tokens["kernel"])
        if drawn[-1] >= 0:
            oracle.advance(drawn[-1])
    return drawn


CORNERS = [-math.inf, -3.4e38, -1e30, -60.0, -1.0, -0.0, 0.0, 1e-45, 0.5, 1.0, 1.0, 2.0, 3.0, 60.0, 1e30, 3.4e38]
FLOAT = st.one_of(
    st.sampled_from(CORNERS), st.floats(-8, 8, width=32), st.floats(width=32, allow_nan=False, allow_infinity=False)
)
TEMPERATURE = st.one_of(st.sampled_from([0.0, 0.000999, 0.001, 0.3, 1.0, 1000.0]), st.floats(0, 3))
PENALTY = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e308, -1e308]), st.floats(-3, 3))
OPTIONS = st.fixed_dictionaries(
    {
        "temperature": TEMPERATURE,
        "top_k": st.one_of(st.sampled_from([-1, 0, 1, 2, 3, 500, 2**40]), st.integers(1, 80)),
        "top_p": st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0, 5e-324]), st.floats(0, 1)),
        "presence": PENALTY,
        "frequency": PENALTY,
        "decay": st.one_of(st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.floats(0, 1)),
    }
)


@st.composite
def small_rows(draw: st.DrawFn) -> torch.Tensor:
    return torch.tensor(draw(st.lists(FLOAT, min_size=1, max_size=80)), dtype=torch.float32)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["V1", "V2"]), OPTIONS, small_rows(), st.integers(0, 2**64 - 1), st.integers(0, 4095))
def test_small_rows_match_the_oracle(rule: str, options: dict[str, Any], logits: torch.Tensor, seed: int, row: int):
    check_steps(rule, options, [logits] * 5, seed, row)


@settings(max_examples=100, deadline=None)
@given(TEMPERATURE, small_rows(), st.integers(0, 2**64 - 1))
def test_small_rows_by_temperature_match_the_oracle(value: float, logits: torch.Tensor, seed: int):
    check_steps("temperature", {"temperature": value}, [logits] * 3, seed, 0)


@st.composite
def medium_rows(draw: st.DrawFn) -> torch.Tensor:
    """Many blocks of 64, with ties among coarse values, banned tokens and runs of equals."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = random.normal(0, draw(st.sampled_from([0.3, 2.0, 8.0])), draw(st.integers(300, 9000)))
    step = draw(st.sampled_from([0.0, 0.25, 4.0]))
    values = np.round(values / step) * step if step else values
    values[random.random(len(values)) < draw(st.sampled_from([0.0, 0.5, 0.999]))] = -np.inf
    values[random.integers(len(values))] = draw(st.sampled_from([-3.0, 9.0]))
    return torch.tensor(values, dtype=torch.float32)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["V1", "V2"]), OPTIONS, medium_rows(), st.integers(0, 2**64 - 1))
def test_rows_of_many_blocks_match_the_oracle(rule: str, options: dict[str, Any], logits: torch.Tensor, seed: int):
    check_steps(rule, options, [logits] * 4, seed, 1)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    "change", [{}, {"top_k": 0}, {"top_p": 1.0}, {"top_k": 0, "top_p": 0.95}, {"temperature": 0.3}]
)
@pytest.mark.parametrize("rule", ["V1", "V2"])
def test_whole_vocabulary_matches_the_oracle(rule: str, change: dict[str, Any], scale: float):
    steps = list(normal_logits(3, 65536, scale))
    assert len(check_steps(rule, DEFAULTS[rule] | change, steps, seed=2**63 + 5, row=3)) == 3


@pytest.mark.parametrize("value", [0.0, 0.2, 1.0, 50.0])
def test_whole_vocabulary_by_temperature_matches_the_oracle(value: float):
    steps = list(normal_logits(6, 65529, 4.0))
    assert len(check_steps("temperature", {"temperature": value}, steps, seed=9, row=0)) == 6


@pytest.mark.parametrize("rule", ["V1", "V2"])
def test_penalties_build_up_over_many_steps(rule: str):
    """Far more distinct tokens than a row has room for at first, and repeats among them."""
    logits = normal_logits(1, 300, 1.0)[0]
    drawn = check_steps(rule, DEFAULTS[rule] | {"top_p": 0.9, "top_k": 200}, [logits] * 250, seed=4, row=1)
    assert 40 < len(set(drawn)) < len(drawn) == 250


def test_half_the_vocabulary_penalised():
    logits = normal_logits(1, 4000, 0.1)[0]
    options = DEFAULTS["V1"] | {"top_k": 0, "top_p": 1.0}
    row, oracle = Row(3, 0, **options), OracleRow("V1", 4000, **options, seed=3)
    for _ in range(3000):
        token = sampling.sample(Rule.V1, logits[None], [row])[0]
        assert token in oracle.choices(logits.numpy())
        oracle.advance(token)
    assert row.state.count > 1500
    ids, values = row.penalties()
    np.testing.assert_array_equal(ids, np.flatnonzero(oracle.drawn))
    np.testing.assert_array_equal(values, oracle.memory[ids])


@pytest.mark.parametrize("sample", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_shares_of_many_draws(rule: str, sample: Any):
    """Chi-square over 20,000 rows whose first draws differ by nothing but the row's index."""
    logits = torch.tensor([0.5, 1.0, -1.0, 1.0, 2.0, -math.inf, 0.0, 1.5, -3.0, 0.0])
    options = {"temperature": 1.3} | ({} if rule == "temperature" else {"top_k": 7, "top_p": 0.9})
    tokens = sample(RULES[rule], logits.repeat(20_000, 1), [Row(77, i, **options) for i in range(20_000)])
    counts = np.bincount(tokens, minlength=10)
    weights = OracleRow(rule, 10, **options).weights(logits.numpy(), options.get("top_p", 1.0))
    expected = 20_000 * weights / weights.sum()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert kept.sum() == {"V1": 7, "V2": 6, "temperature": 9}[rule]
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 40  # eight degrees of freedom: p < 1e-5


def test_v1_scales_the_token_that_crosses():
    """q = 1/2, 1/4, 1/4: with top_p 5/8 the tied pair keeps a quarter of its weight, so 4/5, 1/10, 1/10."""
    logits = torch.log(torch.tensor([0.5, 0.25, 0.25])).repeat(10_000, 1)
    tokens = sampling.sample(Rule.V1, logits, [Row(1, i, temperature=1.0, top_p=0.625) for i in range(10_000)])
    np.testing.assert_allclose(np.bincount(tokens) / 10_000, [0.8, 0.1, 0.1], atol=0.015)


@pytest.mark.parametrize("sample", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_v1_penalises_a_repeat_even_without_presence(sample: Any):
    row, logits = Row(1, 0, temperature=0.0, frequency=3.0), torch.tensor([[5.0, 3.0]])
    assert [sample(Rule.V1, logits, [row])[0] for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize("sample", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_v2_presence_lasts_and_exempt_tokens_have_it_but_no_count(sample: Any):
    row, logits = Row(1, 0, temperature=0.0, presence=1.0, frequency=10.0, decay=1.0), torch.tensor([[5.0, 3.0, 1.5]])
    assert [sample(Rule.V2, logits, [row], (0,))[0] for _ in range(5)] == [0] * 5
    assert [sample(Rule.V2, logits, [row], ())[0] for _ in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("sample", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{"temperature": 0.0009}, {"temperature": 1.0, "top_p": 0.0}])
@pytest.mark.parametrize("rule", [Rule.V1, Rule.V2])
def test_greedy_takes_the_lowest_id_of_equals(rule: Rule, options: dict[str, float], sample: Any):
    logits = torch.zeros(1, 200)
    logits[0, [70, 71, 150]] = 2.0
    row = Row(1, 0, presence=2.0, **options)
    assert [sample(rule, logits, [row])[0] for _ in range(4)] == [70, 71, 150, 0]
