"""A `Step` becomes one forward over all rows and one call per sampler."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from rwkv_lightning.core.interfaces import Batch
from rwkv_lightning.core.request import TokenLogprob
from rwkv_lightning.core.sequence import Backup, Sampled
from rwkv_lightning.kernels.triton.transfers import upload

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
        ready = upload([torch.stack(step.ready)], self.model.device) if step.ready else ()
        if not step.chunks:
            return ready[0]
        logits = self.model.forward(make_batch(step.chunks), self.states)
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


def make_batch(chunks: Seq[Chunk]) -> Batch:
    """The chunks of a step as one ragged batch, rows in the order of the chunks.

    Logits come after the last token of each chunk that wants them, then after every token of the prompts that are to
    get log-probabilities.
    """
    sequences, slots, tokens, wanted = zip(*chunks, strict=True)
    offsets = [0, *accumulate(map(len, tokens))]
    positions = [end - 1 for end, wants in zip(offsets[1:], wanted, strict=True) if wants]
    if any(sequence.params.prompt_logprobs for sequence in sequences):
        scored = [i for i, chunk in enumerate(chunks) if is_scored(chunk)]
        positions += chain.from_iterable(range(offsets[i], offsets[i + 1]) for i in scored)
    return Batch(
        tokens=_tensor(list(chain.from_iterable(tokens)), np.int32),
        offsets=_tensor(offsets, np.int32),
        slots=_tensor(slots, np.int32),
        logit_positions=_tensor(positions, np.int64),
    )


def _tensor(values: Seq[float], dtype: type[np.generic]) -> torch.Tensor:
    """As `torch.tensor`, in a third of its time."""
    return torch.from_numpy(np.array(values, dtype))


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
        known += _entries(logprobs, targets, [chunk.sequence.params.top_logprobs or 0] * len(targets))


@torch.inference_mode()  # logits come from a forward in this mode, and bias is added in place
def draw(logits: torch.Tensor, samples: Seq[Sample]) -> list[Sampled]:
    """One token per sample from float32 logits [S, V]; several samples may share a logits row."""
    if not samples:
        return []
    sequences, rows = zip(*samples, strict=True)
    scored = [i for i, sequence in enumerate(sequences) if sequence.params.top_logprobs is not None]
    # Before bias, penalties and filters, and before a sampler overwrites the logits.
    logprobs = torch.log_softmax(_chosen(logits, [rows[i] for i in scored]), dim=-1) if scored else None
    if rows != tuple(range(len(logits))):
        logits = _chosen(logits, rows)  # forks share a row, and samplers may overwrite it
    _add_bias(logits, sequences)
    tokens = _sample(logits, sequences)
    drawn = list(map(Sampled, tokens))
    if logprobs is not None:
        _add_logprobs(drawn, scored, logprobs, sequences)
    return drawn


def _chosen(logits: torch.Tensor, rows: Seq[int]) -> torch.Tensor:
    """A copy of these rows."""
    (index,) = upload([_tensor(rows, np.int64)], logits.device)
    return logits.index_select(0, index)


def _sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> Seq[int]:
    first = sequences[0].sampler
    if all(sequence.sampler is first for sequence in sequences):
        return first.sample(logits, [sequence.sampler_row for sequence in sequences])
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(id(sequence.sampler), []).append(i)
    tokens = [0] * len(sequences)
    for members in groups.values():
        sampler: Sampler = sequences[members[0]].sampler
        drawn = sampler.sample(_chosen(logits, members), [sequences[i].sampler_row for i in members])
        for i, token in zip(members, drawn, strict=True):
            tokens[i] = token
    return tokens


def _add_bias(logits: torch.Tensor, sequences: Iterable[Sequence]) -> None:
    """Add each row's bias to its logits [S, V], in place."""
    biases = [(i, bias) for i, sequence in enumerate(sequences) if (bias := sequence.params.logit_bias)]
    if not biases:
        return
    rows = np.repeat([i for i, _ in biases], [len(bias) for _, bias in biases])
    ids = _tensor([token for _, bias in biases for token in bias], np.int64)
    values = _tensor([value for _, bias in biases for value in bias.values()], np.float32)
    row, column, value = upload([torch.from_numpy(rows), ids, values], logits.device)
    logits.index_put_((row, column), value, accumulate=True)


def _add_logprobs(drawn: list[Sampled], scored: Seq[int], logprobs: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Complete the draws at `scored`, whose log-probabilities [K, V] these are; a row that failed gets none."""
    counts = [sequences[i].params.top_logprobs or 0 for i in scored]
    entries = _entries(logprobs, [max(drawn[i].token, 0) for i in scored], counts)
    for i, entry in zip(scored, entries, strict=True):
        if drawn[i].token >= 0:
            drawn[i] = Sampled(entry.token, entry)


def _entries(logprobs: torch.Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """One token's entry from each row of log-probabilities [K, V] of all, with the counts[i] likeliest."""
    (ids,) = upload([_tensor(tokens, np.int64)], logprobs.device)
    own = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    for count in set(counts) - {0}:
        members = [i for i, each in enumerate(counts) if each == count]
        values, likeliest = (each.tolist() for each in _chosen(logprobs, members).topk(count))
        for i, top in zip(members, zip(likeliest, values, strict=True), strict=True):
            tops[i] = tuple(zip(*top, strict=True))
    return [TokenLogprob(*entry) for entry in zip(tokens, own, tops, strict=True)]
