"""What a client asked (`GenerationRequest`), one row of it (`Sequence` is in scheduler.py), and how a row ends.

Nothing here imports torch: the scheduler and its tests run without a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Tokens = tuple[int, ...]


class FinishReason(StrEnum):
    STOP = "stop"  # a stop sequence or the end-of-text token
    LENGTH = "length"  # max_tokens generated
    ABORT = "abort"  # the client left, or the request was cancelled
    ERROR = "error"  # the row or its step failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How rows of one request are sampled and when they end.

    Args:
        sampler: the registered sampler's name.
        options: what that sampler's `validate` returned; opaque to everybody else.
        max_tokens: most tokens generated per row, at least 1.
        stop: stop texts, none of them empty; never part of the output.
        seed: key of the row's random stream; the row's index in the request separates rows.
        end_token: id that ends a row (0, end of text), or None to run through it.
        logit_bias: token id -> value added to the logit before penalties.
        top_logprobs: None for no log-probabilities, else how many alternatives per token (0 to 20).
        prompt_logprobs: the prompt's tokens get log-probabilities too; such a prompt is read whole, from no cache.
    """

    sampler: str
    options: Any
    max_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0
    end_token: int | None = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, from the distribution before bias, temperature, filters and penalties.

    Args:
        logprob: None for the first token of a prompt, which nothing predicts.
        top: the likeliest tokens in its place, with theirs, in falling order.
        shown: how many of its bytes lie in the returned text, where the text ends inside the token; None for all.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    shown: int | None = None


@dataclass(frozen=True, slots=True)
class StateSource:
    """Where a row's initial state comes from. The plain base class is the zero state."""


@dataclass(frozen=True, slots=True)
class StateTarget:
    """Where a row's final state goes. The plain base class discards it."""


@dataclass(slots=True)
class GenerationRequest:
    """One client request: `prompts` has one non-empty tuple of token ids per row."""

    id: str
    prompts: list[Tokens]
    params: SamplingParams
    chunk_size: int = 1  # tokens gathered before a row's text is handed on
    source: StateSource = field(default_factory=StateSource)
    target: StateTarget = field(default_factory=StateTarget)
    use_prefix_cache: bool = True
    boundaries: Tokens = ()  # positions in every prompt after which its state is worth keeping: ends of messages


@dataclass(slots=True)
class Usage:
    """Tokens of one row: prompt tokens (of which cached), and generated ones, an end-of-text token included."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Event:
    """News of one row: text that is now certain, and at the end the reason and the usage.

    `tokens` are the ids generated since the row's previous event (the end-of-text token included). `logprobs` come with
    the text they belong to or later; those of the prompt, where asked for, first; none for tokens that are in no text.
    """

    request_id: str
    row: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None  # set on the terminal event
    error: Exception | None = None  # set when finish_reason is ERROR
