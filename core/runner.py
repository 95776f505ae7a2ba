"""A `Step` becomes one forward over all rows and one call per sampler."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.core.interfaces import Batch
from rwkv_lightning.core.request import TokenLogprob
from rwkv_lightning.core.sequence import Backup, Sampled

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import Model, Sampler, SlotStates
    from rwkv_lightning.core.sequence import Chunk, Sequence, Step

    Sample = tuple[Sequence, int]  # a row and the logits row it draws from


class ModelRunner:
    """Drives one model over its resident states. Used from the engine thread only."""

    def __init__(self, model: Model, states: SlotStates) -> None:
        self.model = model
        self.states = states

    def run(self, step: Step) -> list[Sampled]:
        """Move states, run the forward, fork, and draw: one `Sampled` per entry of `step.samples`."""
        self._prepare(step)
        logits = self._forward(step)
        self._capture(step, logits)
        self._fork(step)
        return draw(logits, step.samples)

    def _forward(self, step: Step) -> torch.Tensor:
        """The logits to draw from: those of the chunks that want them, then the rows that are ready."""
        ready = [torch.stack(step.ready).to(self.model.device)] if step.ready else []
        if not step.chunks:
            return ready[0]
        logits = self.model.forward(make_batch(step.chunks, self.model.device), self.states)
        drawn_from = sum(chunk.wants_logits for chunk in step.chunks)
        if len(logits) > drawn_from:
            note_prompt_logprobs(step.chunks, logits[drawn_from:])
        return torch.cat([logits[:drawn_from], *ready]) if ready else logits[:drawn_from]

    def release_memory(self) -> None:
        """After running out of memory: give back what torch holds in reserve on the device."""
        if self.model.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _prepare(self, step: Step) -> None:
        for sequence, slot in step.saves:
            sequence.snapshot = self.states.export(slot)
        for pair in step.copies:  # one by one: a slot may be read, and then given to somebody else
            self.states.copy([pair])
        for sequence, slot in step.restores:
            # A state that a cache keeps has its numbers in a snapshot of its own.
            self.states.restore(slot, getattr(sequence.snapshot, "snapshot", sequence.snapshot))
            sequence.snapshot = None
        if step.resets:
            self.states.reset(step.resets)
        for sequence, slot in step.backups:
            sequence.backup = Backup(len(sequence.generated) - 1, self.states.export(slot))
            sequence.wants_backup = False

    def _capture(self, step: Step, logits: torch.Tensor) -> None:
        for capture in step.captures:
            capture.snapshot = self.states.export(capture.slot)
            if capture.logits_row is not None:
                capture.logits = logits[capture.logits_row].to("cpu", copy=True)

    def _fork(self, step: Step) -> None:
        if step.forks:
            self.states.copy(step.forks)
        for slot, followers in step.fork_saves:
            snapshot = self.states.export(slot)
            for sequence in followers:
                sequence.snapshot = snapshot


def make_batch(chunks: Seq[Chunk], device: str) -> Batch:
    """The chunks of a step as one ragged batch, rows in the order of the chunks.

    Logits come after the last token of each chunk that wants them, then after every token of the prompts that are to
    get log-probabilities.
    """
    tokens: list[int] = []
    offsets = [0]
    positions: list[int] = []
    scored: list[int] = []
    for chunk in chunks:
        tokens += chunk.tokens
        offsets.append(len(tokens))
        if chunk.wants_logits:
            positions.append(len(tokens) - 1)
        if is_scored(chunk):
            scored += range(offsets[-2], offsets[-1])
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int32, device=device),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        slots=torch.tensor([chunk.slot for chunk in chunks], dtype=torch.int32, device=device),
        logit_positions=torch.tensor(positions + scored, dtype=torch.int64, device=device),
    )


def is_scored(chunk: Chunk) -> bool:
    """Whether these are prompt tokens whose request asks for the log-probabilities of its prompt."""
    return chunk.sequence.params.prompt_logprobs and not chunk.sequence.generated


def note_prompt_logprobs(chunks: Seq[Chunk], logits: torch.Tensor) -> None:
    """Give the scored chunks' rows the log-probabilities of the tokens that come next in their prompts.

    logits [S, V]: a row for each token of these chunks, in order.
    """
    for chunk in filter(is_scored, chunks):
        known = chunk.sequence.prompt_logprobs
        targets = chunk.sequence.prompt[len(known) : len(known) + len(chunk.tokens)]
        logprobs = torch.log_softmax(logits[: len(targets)], dim=-1)
        logits = logits[len(chunk.tokens) :]
        count = chunk.sequence.params.top_logprobs or 0
        known += [_of_token(row, count, token) for row, token in zip(logprobs, targets, strict=True)]


@torch.inference_mode()  # logits come from a forward in this mode, and bias is added in place
def draw(logits: torch.Tensor, samples: Seq[Sample]) -> list[Sampled]:
    """One token per sample from float32 logits [S, V]; several samples may share a logits row."""
    if not samples:
        return []
    rows = [row for _, row in samples]
    logprobs = _logprobs(logits, samples)
    if rows != list(range(len(logits))):
        logits = logits[torch.tensor(rows, device=logits.device)]  # forks share a row, and samplers may overwrite it
    _add_bias(logits, samples)
    tokens = _sample(logits, [sequence for sequence, _ in samples])
    return [Sampled(token, _with_token(logprobs.get(i), token)) for i, token in enumerate(tokens)]


def _sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> Seq[int]:
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(id(sequence.sampler), []).append(i)
    if len(groups) == 1:
        return sequences[0].sampler.sample(logits, [sequence.sampler_row for sequence in sequences])
    tokens = [0] * len(sequences)
    for members in groups.values():
        sampler: Sampler = sequences[members[0]].sampler
        part = logits[torch.tensor(members, device=logits.device)]
        drawn = sampler.sample(part, [sequences[i].sampler_row for i in members])
        for i, token in zip(members, drawn, strict=True):
            tokens[i] = token
    return tokens


def _add_bias(logits: torch.Tensor, samples: Seq[Sample]) -> None:
    for i, (sequence, _) in enumerate(samples):
        bias = sequence.request.params.logit_bias
        if bias:
            ids = torch.tensor(list(bias), device=logits.device)
            logits[i, ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)


def _logprobs(logits: torch.Tensor, samples: Seq[Sample]) -> dict[int, tuple[torch.Tensor, int]]:
    """Full log-probabilities [V] of the samples that ask for them, before bias, penalties and filters."""
    return {
        i: (torch.log_softmax(logits[row], dim=-1), sequence.request.params.top_logprobs)
        for i, (sequence, row) in enumerate(samples)
        if sequence.request.params.top_logprobs is not None
    }


def _with_token(distribution: tuple[torch.Tensor, int] | None, token: int) -> TokenLogprob | None:
    return None if distribution is None or token < 0 else _of_token(*distribution, token)


def _of_token(logprobs: torch.Tensor, count: int, token: int) -> TokenLogprob:
    """One token's entry from the log-probabilities [V] of all, with the `count` likeliest."""
    values, ids = logprobs.topk(count) if count else (logprobs[:0], logprobs[:0])
    top = tuple(zip(map(int, ids.tolist()), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
