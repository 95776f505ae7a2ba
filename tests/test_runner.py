"""From logits to draws: shared rows, logit bias, log-probabilities, several samplers in one step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from rwkv_lightning.core.request import SamplingParams
from rwkv_lightning.core.runner import draw, make_batch


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
    chunks: list[Any] = [
        SimpleNamespace(sequence=sequence(), tokens=(7,), slot=3, wants_logits=True),
        SimpleNamespace(sequence=sequence(), tokens=(1, 2, 3), slot=0, wants_logits=False),
        SimpleNamespace(sequence=sequence(), tokens=[4, 5], slot=2, wants_logits=True),
    ]
    batch = make_batch(chunks, "cpu")
    assert batch.tokens.tolist() == [7, 1, 2, 3, 4, 5]
    assert batch.offsets.tolist() == [0, 1, 4, 6]
    assert batch.slots.tolist() == [3, 0, 2]
    assert batch.logit_positions.tolist() == [0, 5]
