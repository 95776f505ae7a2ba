"""A backend without weights, the smallest thing the scheduler can drive: an echo.

Its state is the last `delay` tokens, and the next token is the one heard `delay` tokens ago; so a prompt's last
`delay` tokens come back again and again. A shorter prompt ends at once: the zero state holds the end of text.
`--inference-engine echo` selects it; `[plugins.echo]` can make a step fail, which is how a server's own tests plan
what no real model does on demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field

from rwkv_lightning.core.hookspecs import hookimpl
from rwkv_lightning.core.interfaces import Batch, LoadOptions, ModelConfig

LOUD = 100.0  # logit of the echoed token; all others have 0

Fault = Literal["raise", "out-of-memory", "nan", "die"]


class Section(BaseModel):
    """`[plugins.echo]`.

    Args:
        delay: tokens between a sound and its echo.
        vocab_size: length of a row of logits; at least the vocabulary's size.
        faults: what goes wrong, by the number of the step, the first being 1. `raise` and `out-of-memory` cost the
            step's rows, `nan` its first row; `die` ends the engine, which no exception of a well-behaved model does.
    """

    delay: int = Field(8, ge=1)
    vocab_size: int = Field(65536, ge=2)
    faults: dict[int, Fault] = {}


class EchoStates:
    """The last tokens of each slot, [count, delay] int32; a snapshot is one row of it."""

    def __init__(self, count: int, delay: int) -> None:
        self.count = count
        self.tape = torch.zeros(count, delay, dtype=torch.int32)
        self.nbytes_per_slot = self.tape[0].nbytes

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._row(slot).zero_()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._row(destination).copy_(self._row(source))

    def export(self, slot: int) -> torch.Tensor:
        return self._row(slot).clone()

    def restore(self, slot: int, snapshot: torch.Tensor) -> None:
        if not isinstance(snapshot, torch.Tensor) or snapshot.shape != self.tape[0].shape:
            raise ValueError("the snapshot is not one of this model's")
        self._row(slot).copy_(snapshot)

    def _row(self, slot: int) -> torch.Tensor:
        if not 0 <= slot < self.count:
            raise ValueError(f"slot {slot} does not exist: there are {self.count}")
        return self.tape[slot]


class EchoModel:
    dtype = "int32"
    device = "cpu"

    def __init__(self, section: Section) -> None:
        self.config = ModelConfig(0, 0, 0, 0, 0, vocab_size=section.vocab_size)
        self.description = f"echo of {section.delay} tokens"
        self._delay = section.delay
        self._faults: Mapping[int, Fault] = section.faults
        self._steps = 0

    def new_states(self, count: int) -> EchoStates:
        return EchoStates(count, self._delay)

    def state_nbytes(self) -> int:
        return self.new_states(1).nbytes_per_slot

    def forward(self, batch: Batch, states: EchoStates) -> torch.Tensor:
        self._steps += 1
        fault = self._faults.get(self._steps)
        _fail(fault)
        expected = torch.empty(len(batch.tokens), dtype=torch.int64)  # the token that follows each of the batch's
        offsets = batch.offsets.tolist()
        for slot, begin, end in zip(batch.slots.tolist(), offsets, offsets[1:], strict=False):
            heard = torch.cat([states.tape[slot], batch.tokens[begin:end]])
            expected[begin:end] = heard[1 : end - begin + 1]
            states.tape[slot] = heard[-self._delay :]
        logits = torch.zeros(len(batch.logit_positions), self.config.vocab_size)
        logits.scatter_(1, expected[batch.logit_positions, None], LOUD)
        if fault == "nan":
            logits[:1] = torch.nan
        return logits


def _fail(fault: Fault | None) -> None:
    if fault == "raise":
        raise RuntimeError("the step was told to fail")
    if fault == "out-of-memory":
        raise torch.OutOfMemoryError("CUDA out of memory, or so it was told to say")
    if fault == "die":
        raise SystemExit("the engine was told to die")


class EchoBackend:
    def __init__(self, section: Section) -> None:
        self.section = section

    def probe(self, device: str) -> str | None:
        return None if device == "cpu" else f"an echo needs no '{device}': choose --device cpu"

    def load(self, path: Path, options: LoadOptions) -> EchoModel:
        """The model; the file at `path` is not read."""
        return EchoModel(self.section)


@hookimpl
def plugin_settings() -> type[BaseModel]:
    return Section


@hookimpl
def register_backends(register: Any, section: Section) -> None:
    register("echo", lambda: EchoBackend(section), "no weights: says again what it heard")
