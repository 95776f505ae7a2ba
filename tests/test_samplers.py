"""The samplers against the NumPy oracle, and what must hold for rows, seeds, failures and options."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import OracleRow, philox

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.core.interfaces import SamplerContext
from rwkv_lightning.kernels import sampling, sampling_reference
from rwkv_lightning.kernels.sampling import Row, Rule
from rwkv_lightning.plugins.samplers import temperature, v1, v2
from rwkv_lightning.plugins.samplers.temperature import TemperatureSampler
from rwkv_lightning.plugins.samplers.v1 import V1Sampler
from rwkv_lightning.plugins.samplers.v2 import V2Sampler

RULES = {"V1": Rule.V1, "V2": Rule.V2, "temperature": Rule.TEMPERATURE}
IMPLEMENTATIONS = {"kernel": sampling.sample, "reference": sampling_reference.sample}
DEFAULTS = {
    "V1": {"temperature": 1.0, "top_k": 50, "top_p": 0.6, "presence": 2.0, "frequency": 0.2, "decay": 0.996},
    "V2": {"temperature": 1.0, "top_k": 500, "top_p": 0.5, "presence": 1.0, "frequency": 0.1, "decay": 0.99},
    "temperature": {"temperature": 1.0},
}
EXEMPT = (2, 5)


def normal_logits(rows: int, vocabulary: int, scale: float, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


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


# The rules

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


# Random numbers


def test_philox_known_answers():
    """The vectors published with Random123 for philox4x32-10."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    assert philox(pi[:4], pi[4:]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("sample", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, 2**32, 0x0123456789ABCDEF, 2**64 - 1])
def test_equal_logits_show_the_random_number(seed: int, sample: Any):
    """Over 65,536 equal logits the drawn token is the upper half of x0 of Philox at (position, row, 0, 0)."""
    logits, row = torch.zeros(1, 65536), Row(seed, 41, temperature=1.0)
    for position in range(3):
        x0 = philox([position, 41, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[0]
        assert sample(Rule.TEMPERATURE, logits, [row]) == [x0 >> 16]


def stream(sampler: Any, logits: torch.Tensor, rows: list[Any], steps: int) -> list[list[int]]:
    return [sampler.sample(logits.clone(), rows) for _ in range(steps)]


def built_ins() -> list[Any]:
    return [V1Sampler(), V2Sampler([b"\t", b" ", b"a", b"7", b"77", b""]), TemperatureSampler()]


@pytest.mark.parametrize("sampler", built_ins(), ids=lambda s: s.rule.name)
def test_a_row_draws_the_same_alone_and_in_a_crowd(sampler: Any):
    logits = normal_logits(960, 2000, 2.0)
    options = sampler.validate({})
    crowd = stream(sampler, logits, [sampler.open(options, 11, i) for i in range(960)], 4)
    for i in (0, 63, 64, 700, 959):
        alone = stream(sampler, logits[i : i + 1], [sampler.open(options, 11, i)], 4)
        assert [tokens[i] for tokens in crowd] == [token for (token,) in alone]


@pytest.mark.parametrize("sampler", built_ins(), ids=lambda s: s.rule.name)
def test_seed_and_row_index_separate_streams(sampler: Any):
    logits, options = torch.zeros(1, 5000), sampler.validate({"top_k": 0, "top_p": 1.0})
    first = stream(sampler, logits, [sampler.open(options, 5, 0)], 8)
    assert stream(sampler, logits, [sampler.open(options, 5, 0)], 8) == first
    for seed, row in ((6, 0), (5 + 2**32, 0), (5, 1)):
        assert stream(sampler, logits, [sampler.open(options, seed, row)], 8) != first


@pytest.mark.parametrize("sampler", built_ins(), ids=lambda s: s.rule.name)
def test_any_number_of_threads_draws_the_same(sampler: Any):
    logits, options, threads = normal_logits(50, 3000, 2.0), sampler.validate({}), torch.get_num_threads()
    drawn = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            drawn.append(stream(sampler, logits, [sampler.open(options, 1, i) for i in range(50)], 3))
    finally:
        torch.set_num_threads(threads)
    assert drawn[0] == drawn[1] == drawn[2]


def test_rows_with_different_options_share_a_call():
    logits, sampler = normal_logits(4, 500, 1.0), V1Sampler()
    options = [sampler.validate({"top_k": k, "temperature": t}) for k, t in ((1, 1.0), (0, 2.0), (50, 0.0), (7, 0.5))]
    together = sampler.sample(logits, [sampler.open(o, 3, i) for i, o in enumerate(options)])
    apart = [sampler.sample(logits[i : i + 1], [sampler.open(o, 3, i)])[0] for i, o in enumerate(options)]
    assert together == apart


# Rows that fail, and what a call leaves behind


@pytest.mark.parametrize("sample", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.0}])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_bad_row_fails_alone_and_does_not_advance(rule: Rule, options: dict[str, float], sample: Any):
    logits = normal_logits(6, 130, 1.0)
    rows = [Row(1, i, presence=1.0, decay=0.5, **options) for i in range(6)]
    drawn_before = sample(rule, logits, rows)
    bad = logits.clone()
    bad[1, 129] = math.nan
    bad[2, 3] = math.inf
    bad[3] = -math.inf
    bad[4, drawn_before[4]] = math.nan  # a token that is penalised by now
    values = [row.values.tolist() for row in rows]
    tokens = sample(rule, bad, rows)
    assert [token < 0 for token in tokens] == [False, True, True, True, True, False]
    assert all(token >= -1 for token in tokens)
    assert [row.state.position for row in rows] == [2, 1, 1, 1, 1, 2]
    assert [row.values.tolist() for row in rows[1:5]] == values[1:5]


@pytest.mark.parametrize("sample", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES, ids=RULES)
def test_banned_tokens_are_never_drawn(rule: str, sample: Any):
    logits = torch.full((200, 1000), -math.inf)
    allowed = [0, 64, 500, 999]
    logits[:, allowed] = torch.tensor([0.0, 1.0, -2.0, 0.5])
    rows = [Row(2, i, temperature=5.0, presence=9.0) for i in range(200)]
    drawn = {token for _ in range(5) for token in sample(RULES[rule], logits, rows)}
    assert drawn == set(allowed)


@pytest.mark.parametrize("sampler", built_ins(), ids=lambda s: s.rule.name)
def test_logits_stay_as_they_were(sampler: Any):
    logits = normal_logits(3, 100, 3.0)
    before, rows = logits.clone(), [sampler.open(sampler.validate({}), 1, i) for i in range(3)]
    for _ in range(5):
        sampler.sample(logits, rows)
    assert torch.equal(logits, before)


def test_views_of_larger_tensors_are_read_in_place():
    wide = normal_logits(4, 300, 3.0)
    expected = sampling.sample(Rule.V1, wide[:, 100:200].contiguous(), [Row(1, i, temperature=1.0) for i in range(4)])
    assert sampling.sample(Rule.V1, wide[:, 100:200], [Row(1, i, temperature=1.0) for i in range(4)]) == expected
    turned = wide[:, 100:200].t().contiguous().t()
    assert sampling.sample(Rule.V1, turned, [Row(1, i, temperature=1.0) for i in range(4)]) == expected


def test_no_rows_and_wrong_shapes():
    assert sampling.sample(Rule.V1, torch.zeros(0, 10), []) == []
    for logits in (torch.zeros(2, 10), torch.zeros(1, 10).double(), torch.zeros(10)):
        with pytest.raises(ValueError, match="float32"):
            sampling.sample(Rule.V1, logits, [Row(1, 0, temperature=1.0)])


# Options


def test_defaults():
    one, two, three = (sampler.validate({"unknown": 1}) for sampler in built_ins())
    names = ("temperature", "top_k", "top_p", "alpha_presence", "alpha_frequency", "alpha_decay")
    assert [getattr(one, name) for name in names] == [1.0, 50, 0.6, 2.0, 0.2, 0.996]
    assert [getattr(two, name) for name in names] == [1.0, 500, 0.5, 1.0, 0.1, 0.99]
    assert three.temperature == 1.0


LEGAL = [
    ("temperature", [0, 0.5, 1000]),
    ("top_k", [-5, 0, 1, 10**30]),
    ("top_p", [0, 0.3, 1]),
    ("alpha_presence", [-2, 0, 1.7e308]),
    ("alpha_frequency", [-2, 0, 1.7e308]),
    ("alpha_decay", [0, 0.996, 1]),
]
WRONG = [None, True, "1", [1], {}, math.nan, math.inf, -math.inf]
OUTSIDE = {"temperature": [-0.1, 1000.1, 10**400], "top_k": [1.0, 1.5], "top_p": [-1e-9, 1.01, 2]} | {
    "alpha_presence": [10**400],
    "alpha_frequency": [-(10**400)],
    "alpha_decay": [-0.001, 1.001],
}


@pytest.mark.parametrize(("name", "values"), LEGAL, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("sampler", [V1Sampler(), V2Sampler([])], ids=lambda s: s.rule.name)
def test_fields_are_checked(sampler: Any, name: str, values: list[Any]):
    for value in values:
        options = sampler.validate({name: value})
        assert getattr(options, name) == value
        assert sampler.sample(torch.tensor([[0.0, 1.0]]), [sampler.open(options, 1, 0)])[0] in (0, 1)
    for value in WRONG + OUTSIDE[name]:
        with pytest.raises(InvalidField, match=name) as caught:
            sampler.validate({name: value})
        assert caught.value.param == name
        assert len(caught.value.message) < 120


def test_a_message_names_the_range():
    with pytest.raises(InvalidField, match="temperature must be a number from 0 to 1000, not 1001"):
        TemperatureSampler().validate({"temperature": 1001})
    with pytest.raises(InvalidField, match="alpha_presence must be a finite number, not a value of type str"):
        V1Sampler().validate({"alpha_presence": "x" * 1000})


def test_the_temperature_sampler_ignores_the_other_fields():
    assert TemperatureSampler().validate({"top_p": "?", "temperature": 0.5}).temperature == 0.5


def test_v2_finds_the_exempt_tokens_by_their_bytes():
    token_bytes = [b"", b"\t", b"0", b"00", b"9", b" ", b"  ", b"\n", b"a", b"5"]
    assert V2Sampler(token_bytes).exempt == (1, 2, 4, 5, 9)


def test_registration():
    found: dict[str, Any] = {}
    for module in (v1, v2, temperature):
        module.register_samplers(lambda name, factory, description: found.update({name: (factory, description)}))
    context = SamplerContext(vocab_size=3, token_bytes=[b"", b"1", b"x"])
    made = {name: type(factory(context)) for name, (factory, _) in found.items()}
    assert made == {"V1": V1Sampler, "V2": V2Sampler, "temperature": TemperatureSampler}
    assert found["V2"][0](context).exempt == (1,)
    assert all(description for _, description in found.values())


def test_a_row_may_change_hands_between_kernel_and_reference():
    logits = normal_logits(1, 400, 2.0)
    options = DEFAULTS["V2"] | {"top_k": 0, "top_p": 1.0}
    mixed, plain = Row(8, 2, **options), Row(8, 2, **options)
    for step in range(80):
        sample = list(IMPLEMENTATIONS.values())[step % 2]
        assert sample(Rule.V2, logits, [mixed], EXEMPT) == sampling.sample(Rule.V2, logits, [plain], EXEMPT)


def test_another_device_gets_the_reference_and_the_reason():
    function, why = sampling.select("meta")
    assert function is sampling_reference.sample
    assert "reference" in why
