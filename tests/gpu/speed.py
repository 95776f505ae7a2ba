"""Decoding and prefill of a random model: `python tests/gpu/speed.py SHAPE CEILINGS.json [--rows 1 64] [--prompt 512]`.

Prints a table row per batch size: tokens/s with drawing by V1's defaults, the forward's own time, and the share of what
the ceilings that machine.py measured would allow.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from machine import DEVICE, DTYPE, seconds
from models import random_model, step_cost

from rwkv_lightning.core.interfaces import Batch
from rwkv_lightning.core.rwkv7 import RWKV7
from rwkv_lightning.core.slots import SlotPool
from rwkv_lightning.kernels.sampling import Row, Rule, sample


class Decoder:
    """Rows that decode, one token per step, over the first slots of a pool."""

    def __init__(self, model: RWKV7, pool: SlotPool, rows: int) -> None:
        self.model, self.pool = model, pool
        self.slots = torch.arange(rows, dtype=torch.int32)
        self.offsets = torch.arange(rows + 1, dtype=torch.int32)
        self.positions = torch.arange(rows)
        self.tokens = list(range(rows))
        draws = {"top_k": 50, "top_p": 0.6, "presence": 2.0, "frequency": 0.2, "decay": 0.996}
        self.rows = [Row(1, i, temperature=1.0, **draws) for i in range(rows)]

    def forward(self) -> torch.Tensor:
        fed = torch.tensor(self.tokens, dtype=torch.int32) % self.model.config.vocab_size
        return self.model.forward(Batch(fed, self.offsets, self.slots, self.positions), self.pool)

    def step(self) -> None:
        self.tokens = sample(Rule.V1, self.forward(), self.rows)


def that_fit(model: RWKV7, rows: list[int]) -> list[int]:
    """The batches whose states fit into the memory that is left, beside as much again for a step."""
    free = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 1 << 30
    return [each for each in rows if 2 * each * model.state_nbytes() < free]


def ideal(ceilings: dict[str, float], cost: tuple[float, float]) -> float:
    """Seconds that memory and products need at least."""
    return max(cost[0] / ceilings["bytes"], cost[1] / ceilings["flops"])


def prefill(model: RWKV7, pool: SlotPool, tokens: int) -> float:
    """Seconds for a prompt of this many tokens in one step."""
    prompt = torch.arange(tokens, dtype=torch.int32) % model.config.vocab_size
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    slot, last = torch.zeros(1, dtype=torch.int32), torch.tensor([tokens - 1])
    return seconds(lambda: model.forward(Batch(prompt, offsets, slot, last), pool), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("ceilings", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 960])
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 2048])
    options = parser.parse_args()
    ceilings = json.loads(options.ceilings.read_text())
    model = random_model(options.shape, DEVICE, DTYPE)
    batches = that_fit(model, options.rows)
    pool = model.new_states(max(batches))
    eager = random_model("tiny", DEVICE, DTYPE, graphs=False)
    print(f"| {options.shape} | {model.description} |")
    for rows in sorted(set(options.rows) - set(batches)):
        print(f"| {options.shape} decode, {rows} rows | the states do not fit into this card's memory |")
    for rows in batches:
        decoder = Decoder(model, pool, rows)
        step, forward = seconds(decoder.step), seconds(decoder.forward)
        share = ideal(ceilings, step_cost(options.shape, rows, rows)) / step
        figures = f"{rows / step:,.0f} tokens/s, step {step * 1e3:.2f} ms, forward {forward * 1e3:.2f} ms"
        print(f"| {options.shape} decode, {rows} rows | {figures}, {share:.0%} of the ceiling |", flush=True)
    for tokens in options.prompt:
        took = prefill(model, pool, tokens)
        share = ideal(ceilings, step_cost(options.shape, tokens, 1)) / took
        print(
            f"| {options.shape} prefill, {tokens} tokens | {tokens / took:,.0f} tokens/s, {share:.0%} of the ceiling |"
        )
    small = Decoder(eager, eager.new_states(1), 1)
    replayed = random_model("tiny", DEVICE, DTYPE)
    graphed = Decoder(replayed, replayed.new_states(1), 1)
    print(f"| tiny step, eager and replayed | {seconds(small.step) * 1e3:.2f}, {seconds(graphed.step) * 1e3:.2f} ms |")


if __name__ == "__main__":
    main()
