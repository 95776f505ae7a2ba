"""`SamplerSuite`: a row's draws depend on its own seed, logits and options, and bad values are refused by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.core.interfaces import Sampler, SamplerContext, SamplerRow
from rwkv_lightning.core.testing.suite import Suite, check, check_raises

SEED = 2**63 + 12345  # seeds are 64 bits wide
STEPS = 8
ORACLE_ROWS = 4000


class SamplerSuite(Suite, ABC):
    """Subclass it, and return the sampler from `sampler`.

    Attributes:
        vocab_size: V of the logits in the tests.
        wrong: values that must be refused, by field.
        accepted: field sets that must be accepted; they draw in the same calls too.
        draws: False for a sampler that never draws at random, so that seeds mean nothing.
    """

    vocab_size: ClassVar[int] = 1000
    wrong: ClassVar[Mapping[str, Sequence[Any]]] = {}
    accepted: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    draws: ClassVar[bool] = True

    @abstractmethod
    def sampler(self, context: SamplerContext) -> Sampler:
        """The sampler under test, as its factory makes it."""

    def oracle(self, logits: torch.Tensor, fields: Mapping[str, Any]) -> torch.Tensor | None:
        """Probabilities [V] of a fresh row's first draw from float64 logits [V]; None when there is no oracle."""
        return None

    # Helpers, for further tests of your own too

    def make(self) -> Sampler:
        token_bytes = [b"", *(f"{i} ".encode() for i in range(1, self.vocab_size))]
        return self.sampler(SamplerContext(self.vocab_size, token_bytes))

    def logits(self, rows: int, scale: float = 2.0) -> torch.Tensor:
        """Normal float32 logits [rows, V]; the same rows first, however many."""
        generator = torch.Generator().manual_seed(4)
        return torch.randn(rows, self.vocab_size, generator=generator) * scale

    def open(self, sampler: Sampler, row: int = 0, seed: int = SEED, **fields: Any) -> SamplerRow:
        """A row of a request with these fields, which must be accepted."""
        try:
            options = sampler.validate(fields)
        except InvalidField as error:
            raise AssertionError(f"{fields} is refused: {error}") from error
        return sampler.open(options, seed, row)

    def stream(
        self, sampler: Sampler, rows: Sequence[SamplerRow], logits: torch.Tensor, steps: int = STEPS
    ) -> list[list[int]]:
        """The tokens of several steps, each checked for its form."""
        return [self.draw(sampler, rows, logits) for _ in range(steps)]

    def draw(self, sampler: Sampler, rows: Sequence[SamplerRow], logits: torch.Tensor) -> list[int]:
        tokens = list(sampler.sample(logits.clone(), rows))
        check(len(tokens) == len(rows), f"{len(tokens)} tokens for {len(rows)} rows")
        good = all(int(token) == token and -1 <= token < logits.shape[1] for token in tokens)
        check(good, f"not all of {tokens[:5]} are ids from 0 to {logits.shape[1] - 1}, or -1")
        return [int(token) for token in tokens]

    # Parameters

    def test_requests_that_name_nothing_are_served(self) -> None:
        sampler = self.make()
        strange: dict[str, Any] = {"a_field_of_another_sampler": object(), "max_tokens": 5}
        for fields in ({}, strange):
            tokens = self.draw(sampler, [self.open(sampler, **fields)], self.logits(1))
            check(tokens[0] >= 0, "a row of good logits got no token")

    def test_wrong_values_are_refused_by_name(self) -> None:
        sampler = self.make()
        for name, values in self.wrong.items():
            for value in values:
                what = f"{name}: {str(value)[:40]!r}"
                error = check_raises(lambda fields={name: value}: sampler.validate(fields), InvalidField, what)  # type: ignore[misc]
                check(getattr(error, "param", None) == name, f"{what}: param does not name the field")
                check(name in str(error) and len(str(error)) < 300, f"{what}: the message does not name it, or is long")

    def test_accepted_values_are_accepted(self) -> None:
        sampler = self.make()
        for fields in self.accepted:
            rows = [self.open(sampler, **fields)]
            check(self.draw(sampler, rows, self.logits(1))[0] >= 0, f"{dict(fields)}: no token")

    # Random streams

    def test_the_same_seed_gives_the_same_tokens(self) -> None:
        sampler, logits = self.make(), self.logits(1)
        first = self.stream(sampler, [self.open(sampler)], logits)
        check(self.stream(sampler, [self.open(sampler)], logits) == first, "a row opened again draws otherwise")
        again = self.make()
        check(self.stream(again, [self.open(again)], logits) == first, "another sampler object draws otherwise")

    def test_seeds_and_rows_have_streams_of_their_own(self) -> None:
        sampler, flat = self.make(), torch.zeros(1, self.vocab_size)
        keys = [(SEED, 0), (SEED + 1, 0), (SEED, 1), (SEED - 2**32, 0), (0, 0), (2**64 - 1, 4095)]
        rows = [[self.open(sampler, row=row, seed=seed)] for seed, row in keys]
        streams = {str(self.stream(sampler, row, flat)) for row in rows}
        expected = len(keys) if self.draws else 1
        check(
            len(streams) == expected, f"{len(keys)} pairs of seed and row give {len(streams)} streams, not {expected}"
        )

    def test_a_crowd_changes_nothing(self) -> None:
        sampler, logits = self.make(), self.logits(65)
        crowd = self.stream(sampler, [self.open(sampler, row=i) for i in range(65)], logits)
        for i in (0, 1, 31, 64):
            alone = self.stream(sampler, [self.open(sampler, row=i)], logits[i : i + 1])
            check([[step[i]] for step in crowd] == alone, f"row {i} draws otherwise alone than among 65")

    def test_rows_may_change_places(self) -> None:
        sampler, logits = self.make(), self.logits(5)
        straight = [self.open(sampler, row=i) for i in range(5)]
        turned = [self.open(sampler, row=i) for i in range(5)]
        for step in range(STEPS):
            order = [(i + step) % 5 for i in range(5)]
            moved = self.draw(sampler, [turned[i] for i in order], logits[order])
            kept = self.draw(sampler, straight, logits)
            check([kept[i] for i in order] == moved, "a row's draws depend on its place in the call")

    def test_rows_with_other_options_share_a_call(self) -> None:
        sampler = self.make()
        sets = list(self.accepted)
        logits = self.logits(len(sets))
        together = self.stream(sampler, [self.open(sampler, row=i, **f) for i, f in enumerate(sets)], logits)
        for i, fields in enumerate(sets):
            alone = self.stream(sampler, [self.open(sampler, row=i, **fields)], logits[i : i + 1])
            check([[step[i]] for step in together] == alone, f"{dict(fields)} draws otherwise beside other options")

    def test_a_new_row_remembers_nothing(self) -> None:
        sampler, logits = self.make(), self.logits(1, scale=0.5)
        first = self.stream(sampler, [self.open(sampler)], logits, steps=40)
        self.stream(sampler, [self.open(sampler, row=1, seed=3)], logits, steps=40)
        check(
            self.stream(sampler, [self.open(sampler)], logits, steps=40) == first, "a new row has an old row's memory"
        )

    # Logits

    def test_bad_rows_fail_alone_and_do_not_advance(self) -> None:
        sampler, logits = self.make(), self.logits(5)
        bad = logits.clone()
        bad[1, -1], bad[2], bad[3] = math.nan, math.nan, -math.inf
        shaken, calm = ([self.open(sampler, row=i) for i in range(5)] for _ in range(2))
        for rows in (shaken, calm):
            self.draw(sampler, rows, logits)
        tokens = self.draw(sampler, shaken, bad)
        failed = [token < 0 for token in tokens]
        check(failed == [False, True, True, True, False], f"rows 1 to 3 of 5 are bad, those that fail are {failed}")
        expected = self.draw(sampler, [calm[0], calm[4]], logits[[0, 4]])
        check([tokens[0], tokens[4]] == expected, "good rows draw otherwise beside bad ones")
        after = self.stream(sampler, shaken[1:4], logits[1:4])
        check(after == self.stream(sampler, calm[1:4], logits[1:4]), "a bad row was advanced")

    def test_banned_tokens_are_never_drawn(self) -> None:
        sampler = self.make()
        allowed = [0, self.vocab_size // 2, self.vocab_size - 1]
        logits = torch.full((50, self.vocab_size), -math.inf)
        logits[:, allowed] = torch.tensor([0.0, 0.5, 0.1])
        for fields in self.accepted:
            rows = [self.open(sampler, row=i, **fields) for i in range(50)]
            drawn = {token for step in self.stream(sampler, rows, logits, 4) for token in step}
            check(drawn <= set(allowed), f"{dict(fields)}: tokens of logit -inf were drawn, or none")

    def test_extreme_logits_are_served(self) -> None:
        sampler = self.make()
        logits = torch.zeros(4, self.vocab_size)
        logits[0, 3], logits[1], logits[2], logits[3, ::2] = 3e38, -3e38, 3e38, -3e38
        for fields in self.accepted:
            tokens = self.draw(sampler, [self.open(sampler, row=i, **fields) for i in range(4)], logits)
            check(min(tokens) >= 0 and tokens[0] == 3, f"{dict(fields)}: huge finite logits give {tokens}")

    def test_shares_are_the_oracles(self) -> None:
        """Chi-square of the first draws of rows that differ by their index only."""
        sampler, logits = self.make(), self.logits(1)
        for fields in self.accepted:
            expected = self.oracle(logits[0].double(), fields)
            if expected is not None:
                rows = [self.open(sampler, row=i, **fields) for i in range(ORACLE_ROWS)]
                tokens = self.draw(sampler, rows, logits.expand(ORACLE_ROWS, -1))
                counts = torch.bincount(torch.tensor(tokens), minlength=self.vocab_size)
                _check_shares(counts, expected, str(dict(fields)))


def _check_shares(counts: torch.Tensor, probabilities: torch.Tensor, what: str) -> None:
    """Rare tokens count as one; the bound is far out: degrees of freedom + 6 standard deviations."""
    check(abs(float(probabilities.sum()) - 1) < 1e-6, f"{what}: the oracle's probabilities do not sum to 1")
    check(not counts[probabilities == 0].any(), f"{what}: tokens were drawn whose probability is 0")
    expected = probabilities * counts.sum()
    often = expected >= 10
    observed = torch.cat([counts[often], counts[~often].sum()[None]]).double()
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    square = float(((observed - expected) ** 2 / expected.clamp(min=1)).sum())
    freedom = max(len(expected) - 1, 1)
    bound = freedom + 6 * math.sqrt(2 * freedom) + 10
    check(
        square < bound, f"{what}: chi-square {square:.0f} over {freedom} degrees of freedom, expected below {bound:.0f}"
    )
