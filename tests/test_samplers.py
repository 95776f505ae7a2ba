"""What must hold for the samplers' rows, seeds, failures and options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampling_cases import DEFAULTS, EXEMPT, IMPLEMENTATIONS, RULES, normal_logits
from sampling_oracle import philox

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.core.interfaces import SamplerContext
from rwkv_lightning.kernels import sampling, sampling_reference
from rwkv_lightning.kernels.sampling import Row, Rule
from rwkv_lightning.plugins.samplers import temperature, v1, v2
from rwkv_lightning.plugins.samplers.temperature import TemperatureSampler
from rwkv_lightning.plugins.samplers.v1 import V1Sampler
from rwkv_lightning.plugins.samplers.v2 import V2Sampler

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
