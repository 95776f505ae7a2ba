"""From logits to draws: shared rows, logit bias, log-probabilities, several samplers in one step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from rwkv_lightning.core.interfaces import Batch
from rwkv_lightning.core.request import SamplingParams, TokenLogprob
from rwkv_lightning.core.runner import draw, make_batch, note_prompt_logprobs
from rwkv_lightning.core.sequence import Chunk


class Largest:
    """A sampler that takes the largest logit, and spoils what it was given."""

    def sample(self, logits: torch.Tensor, rows: list[Any]) -> list[int]:
        tokens = logits.argmax(-1).tolist()
        logits.fill_(float("nan"))
        return [-1 if row == "bad" else token for row, token in zip(rows, tokens, strict=True)]


class Smallest:
    def sample(self, logits: torch.Tensor, rows: list[Any]) -> list[int]:
        return logits.argmin(-1).tolist()


def sequence(sampler: Any = None, row: Any = None, **params: Any) -> Any:
    chosen = SamplingParams("x", None, 1, **params)
    request = SimpleNamespace(params=chosen)
    return SimpleNamespace(
        sampler=sampler or LARGEST, sampler_row=row, request=request, params=chosen, generated=[], prompt=(1, 2)
    )


LARGEST = Largest()
LOGITS = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])


def test_rows_are_drawn_in_the_order_of_the_samples() -> None:
    drawn = draw(LOGITS.clone(), [(sequence(), 0), (sequence(), 1)])
    assert [d.token for d in drawn] == [1, 0]
    assert draw(torch.empty(0, 3), []) == []


def test_rows_that_share_logits_do_not_spoil_each_other() -> None:
    drawn = draw(LOGITS.clone(), [(sequence(), 1), (sequence(), 0), (sequence(), 1), (sequence(), 1)])
    assert [d.token for d in drawn] == [0, 1, 0, 0]


def test_samplers_are_called_for_their_own_rows() -> None:
    smallest = Smallest()
    samples = [(sequence(), 0), (sequence(smallest), 0), (sequence(), 1), (sequence(smallest), 1)]
    assert [d.token for d in draw(LOGITS.clone(), samples)] == [1, 0, 0, 1]


def test_bias_is_added_for_its_row_only() -> None:
    drawn = draw(LOGITS.clone(), [(sequence(logit_bias={2: 100.0}), 0), (sequence(), 0)])
    assert [d.token for d in drawn] == [2, 1]


def test_every_row_gets_its_own_bias() -> None:
    logits = torch.zeros(4, 3)
    biases: list[dict[int, float]] = [{0: 1.5, 2: -0.25}, {}, {2: 3.0, 1: 2.0}, {0: -100.0}]
    seen: list[torch.Tensor] = []

    class Noting(Largest):
        def sample(self, logits: torch.Tensor, rows: list[Any]) -> list[int]:
            seen.append(logits.clone())
            return super().sample(logits, rows)

    sampler = Noting()
    draw(logits, [(sequence(sampler, logit_bias=bias), row) for row, bias in enumerate(biases)])
    assert seen[0].tolist() == [[bias.get(token, 0.0) for token in range(3)] for bias in biases]


def test_rows_get_as_many_alternatives_as_they_ask_for() -> None:
    samples = [(sequence(top_logprobs=count), i % 2) for i, count in enumerate((2, None, 0, 3, 2))]
    entries = [drawn.logprob for drawn in draw(LOGITS.clone(), samples)]
    assert [entry and len(entry.top) for entry in entries] == [2, None, 0, 3, 2]
    expected = torch.log_softmax(LOGITS, dim=-1)
    for (_, row), entry in zip(samples, entries, strict=True):
        if entry is not None:
            assert entry.token == int(LOGITS[row].argmax())
            assert math.isclose(entry.logprob or 0.0, float(expected[row].max()), rel_tol=1e-5)
            assert [token for token, _ in entry.top] == expected[row].argsort(descending=True)[
                : len(entry.top)
            ].tolist()


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    (drawn,) = draw(LOGITS.clone(), [(sequence(top_logprobs=2, logit_bias={2: 100.0}), 0)])
    total = math.log(sum(math.exp(x) for x in LOGITS[0].tolist()))
    assert drawn.token == 2
    assert drawn.logprob is not None
    assert math.isclose(drawn.logprob.logprob, 1.0 - total, rel_tol=1e-5)
    assert [token for token, _ in drawn.logprob.top] == [1, 2]
    assert math.isclose(drawn.logprob.top[0][1], 3.0 - total, rel_tol=1e-5)


def test_a_failed_row_has_no_logprob() -> None:
    bad, good = draw(LOGITS.clone(), [(sequence(row="bad", top_logprobs=1), 0), (sequence(top_logprobs=1), 1)])
    assert bad.token == -1
    assert bad.logprob is None
    assert good.logprob is not None


def test_a_batch_is_ragged() -> None:
    chunks = [
        Chunk(sequence(), 3, (7,), True),
        Chunk(sequence(), 0, (1, 2, 3), False),
        Chunk(sequence(), 2, (4, 5), True),
    ]
    batch = make_batch(chunks)
    assert batch.tokens.tolist() == [7, 1, 2, 3, 4, 5]
    assert batch.offsets.tolist() == [0, 1, 4, 6]
    assert batch.slots.tolist() == [3, 0, 2]
    assert batch.logit_positions.tolist() == [0, 5]
    types = [getattr(batch, name).dtype for name in Batch.__dataclass_fields__]
    assert types == [torch.int32, torch.int32, torch.int32, torch.int64]


def test_a_batch_may_want_no_logits() -> None:
    batch = make_batch([Chunk(sequence(), 0, (1, 2, 3), False)])
    assert batch.logit_positions.tolist() == []
    assert batch.logit_positions.dtype == torch.int64


def test_prompts_that_are_scored_get_logits_after_every_token() -> None:
    scored = sequence(prompt_logprobs=True, top_logprobs=1)
    scored.prompt, scored.prompt_logprobs = (9, 0, 2, 1), [TokenLogprob(9, None)]
    chunks = [Chunk(sequence(), 1, (7,), True), Chunk(scored, 0, (9, 0, 2), False)]
    assert make_batch(chunks).logit_positions.tolist() == [0, 1, 2, 3]
    logits = torch.tensor([[3.0, 0.0, 1.0], [0.0, 0.0, 5.0], [2.0, 2.5, 0.0]])
    note_prompt_logprobs(chunks, logits)
    expected = torch.log_softmax(logits, dim=-1)
    noted = scored.prompt_logprobs[1:]
    assert [entry.token for entry in noted] == [0, 2, 1]
    for entry, row, token in zip(noted, expected, (0, 2, 1), strict=True):
        assert math.isclose(entry.logprob, float(row[token]), rel_tol=1e-5)
        assert entry.top == ((token, entry.logprob),)
