"""How large and how fast RWKV-7 models are on paper: `python -m benchmarks.scaling [--write docs/scaling.md]`.

The formulas are those that docs/scaling.md states. A step is a sequence of matrix products, each of which takes the
longer of its arithmetic and its weights' way from memory, and of the states' way from memory and back.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.common import document
from rwkv_lightning.core.random_checkpoint import SHAPES, ModelShape

BATCHES = (1, 8, 64, 256, 960)
NAMES = ("0.1b", "0.4b", "1.5b", "2.9b", "7.2b", "13.3b")
DEVICE_SHARE = 0.9  # of a device's memory that weights and states may take; the rest is buffers and the system
# The last layer's matrices that are needed for the last tokens of a prompt only, and so is the head.
LAST = ("att.receptance", "att.g1", "att.g2", "att.output", "ffn.key", "ffn.value")
KEPT_FLOAT32 = 4  # bytes of an element of the shift states


@dataclass(frozen=True, slots=True)
class Machine:
    """Args: memory: bytes; bandwidth: bytes/s read; products: operations/s of dense matrix products in 16 bits."""

    name: str
    memory: float
    bandwidth: float
    products: float


# One core: benchmarks.ceilings on a Zen 4 virtual machine; the cards: their makers' figures, dense, not sparse.
MACHINES = {
    "core": Machine("CPU, 1 core", 24e9, 30e9, 224e9),
    "server": Machine("CPU, 16 cores", 128e9, 300e9, 16 * 224e9),
    "3090": Machine("RTX 3090, 24 GB", 24e9, 936e9, 71e12),
    "4090": Machine("RTX 4090, 24 GB", 24e9, 1008e9, 165e12),
    "h200": Machine("H200, 141 GB", 141e9, 4800e9, 989e12),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A shape and how its numbers are kept.

    Args:
        weight_bytes: of an element of a matrix: 2 for bf16 and fp16, 1 for int8.
        state_bytes: of an element of the wkv state: 2 for fp16, 4 for fp32.
    """

    shape: ModelShape
    weight_bytes: float = 2
    state_bytes: int = 2

    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of every matrix that a token is multiplied with; those for the last tokens only come last."""
        return [size for group in matrices_of(self.shape) for size in group]

    def weights(self) -> float:
        """Bytes that stay in memory: every parameter, the embedding included."""
        return self.shape.parameters() * self.weight_bytes

    def state(self) -> int:
        """Bytes of one sequence's state: L (C N state_bytes + 2 C 4)."""
        s = self.shape
        return s.n_layer * s.n_embd * (s.head_size * self.state_bytes + 2 * KEPT_FLOAT32)

    def slots(self, machine: Machine) -> int:
        """States that fit beside the weights; 0 when the weights do not fit."""
        return max(0, int((machine.memory * DEVICE_SHARE - self.weights()) // self.state()))

    def step(self, machine: Machine, rows: int, tokens: int | None = None, logits: int | None = None) -> float:
        """Seconds of a step over `rows` states, `tokens` tokens (rows) and `logits` tokens with logits (tokens)."""
        tokens = rows if tokens is None else tokens
        logits = tokens if logits is None else logits
        early, late = (
            sum(number * self._product(machine, n, k, count) for (n, k), number in group) if count else 0.0
            for group, count in zip(grouped(self.shape), (tokens, logits), strict=True)
        )
        return early + late + 2 * rows * self.state() / machine.bandwidth

    def _product(self, machine: Machine, n: int, k: int, tokens: int) -> float:
        return max(2 * n * k * tokens / machine.products, n * k * self.weight_bytes / machine.bandwidth)

    def decode(self, machine: Machine, rows: int) -> float:
        """Tokens per second of `rows` sequences."""
        return rows / self.step(machine, rows)

    def prefill(self, machine: Machine, tokens: int) -> float:
        """Prompt tokens per second of one prompt read in one step, logits after its last token only."""
        return tokens / self.step(machine, 1, tokens, 1)


@cache
def matrices_of(shape: ModelShape) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Sizes of the matrices that every token needs, and of those that only the last tokens of a prompt need."""
    sizes = {name: size for name, size in shape.tensors().items() if len(size) == 2 and not name.endswith("r_k")}
    del sizes["emb.weight"]
    late = tuple(f"blocks.{shape.n_layer - 1}.{name}" for name in LAST)
    groups: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for name, (n, k) in sizes.items():
        groups[name.startswith((*late, "head."))].append((n, k))
    return groups


@cache
def grouped(shape: ModelShape) -> tuple[list[tuple[tuple[int, int], int]], ...]:
    """How many matrices of each size there are in either group."""
    return tuple(list(Counter(part).items()) for part in matrices_of(shape))


def size_table() -> Iterator[str]:
    """Parameters, weights and states."""
    yield "| model | layers x width | parameters | bf16 weights | int8 weights | state fp16 | fp32 | 960 in fp16 |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in NAMES:
        model = Model(SHAPES[name])
        wide, int8 = replace(model, state_bytes=4), replace(model, weight_bytes=1)
        shape = model.shape
        cells = [f"{shape.n_layer} x {shape.n_embd}", f"{shape.parameters() / 1e6:,.0f} M"]
        cells += [_bytes(value) for value in (model.weights(), int8.weights(), model.state(), wide.state())]
        yield f"| {name} | {' | '.join(cells)} | {_bytes(960 * model.state())} |"


def speed_table() -> Iterator[str]:
    """Slots and the ceiling of tokens/s on each machine, with 16-bit states."""
    batches = " | ".join(f"{rows} row{'s' * (rows > 1)}" for rows in BATCHES)
    yield f"| machine | model | slots | {batches} | prompt of 512 |"
    yield "|---|---|---" + "|---" * len(BATCHES) + "|---|"
    for machine in MACHINES.values():
        for name in NAMES:
            yield f"| {machine.name} | {' | '.join(_speeds(name, machine))} |"


def _speeds(name: str, machine: Machine) -> list[str]:
    """A line of the table; a model too large in 16 bits is taken in int8, its products still in 16 bits."""
    model = Model(SHAPES[name])
    if not model.slots(machine):
        model, name = replace(model, weight_bytes=1), f"{name} int8"
    slots = model.slots(machine)
    decode = [_count(model.decode(machine, rows)) if rows <= slots else "-" for rows in BATCHES]
    return [name, f"{slots:,}", *decode, _count(model.prefill(machine, 512))]


def _bytes(value: float) -> str:
    power = min(3, int(math.log10(value)) // 3)
    value, unit = value / 1000**power, ("B", "kB", "MB", "GB")[power]
    return f"{value:.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def with_tables(text: str) -> str:
    """The document with both tables as they should be, between their marks."""
    for name, lines in (("sizes", size_table()), ("speeds", speed_table())):
        table = "".join(f"{line}\n" for line in lines)
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)",
            lambda mark, table=table: f"{mark[1]}{table}{mark[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"the document needs the marks of the table of {name} once")
    return text


def marked(text: str) -> Path:
    """A command line's document that has the tables' marks."""
    path = document(text)
    try:
        with_tables(path.read_text())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", type=marked, metavar="FILE", help="put the tables between the marks of this document"
    )
    options = parser.parse_args(arguments)
    if options.write:
        options.write.write_text(with_tables(options.write.read_text()))
    else:
        print("\n".join([*size_table(), "", *speed_table()]))


if __name__ == "__main__":
    main()
