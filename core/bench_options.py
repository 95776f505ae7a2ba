"""The options of `rwkv-lightning bench`, and the plan they make. Imports nothing heavy: the command line reads it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("decode", "prefill", "sampler", "http", "ttft")
SHAPES = ("0.1b", "0.4b", "1.5b", "2.9b", "7.2b", "13.3b")
GROUPS = ("general", "model", "engine", "plugins")  # of the settings, that the command takes


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Args:
        rows: batch sizes of the decode measurement.
        prefill: lengths of the prompts.
        connections: numbers of HTTP streams.
        beside: rows of the big batch beside which a chat's first token is timed.
        seconds: what one round of one measurement may take, about.
    """

    parts: tuple[str, ...] = PARTS
    rows: tuple[int, ...] = (1, 8, 64, 256, 960)
    prefill: tuple[int, ...] = (512,)
    connections: tuple[int, ...] = (64, 960)
    beside: int = 960
    rounds: int = 5
    seconds: float = 1.0

    def rounds_in_all(self, samplers: int) -> int:
        """How many rounds of measurements there are, for the progress bar."""
        each = {"decode": len(self.rows), "prefill": len(self.prefill), "sampler": samplers}
        each |= {"http": 2 * len(self.connections), "ttft": 0}
        served = "http" in self.parts or "ttft" in self.parts
        return sum(each[part] * self.rounds for part in self.parts) + ("ttft" in self.parts) + served


QUICK = {"rows": (1, 8, 64), "connections": (64,), "beside": 64, "rounds": 2, "seconds": 0.3}


def take_plan(options: dict[str, Any]) -> Plan:
    """The plan that the command's own options ask for; they are taken out of `options`."""
    chosen: dict[str, Any] = dict(QUICK) if options.pop("quick") else {}
    for name in ("parts", "rows", "prefill", "connections", "beside", "rounds"):
        value = options.pop(name)
        if value is not None:
            chosen[name] = value
    return Plan(**chosen)


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """The command's own options, besides those of the settings."""
    group = parser.add_argument_group("bench")
    group.add_argument("--shape", choices=SHAPES, help="measure a random model of this shape, made once and kept")
    meaning = "backend that loads and multiplies the weights: the same as --inference-engine"
    group.add_argument("--engine", dest="inference_engine", metavar="NAME", default=argparse.SUPPRESS, help=meaning)
    group.add_argument(
        "--only",
        dest="parts",
        type=_list(_part),
        metavar="PARTS",
        help=f"some of {','.join(PARTS)} [default: all]",
    )
    for name, what in (("rows", "batch sizes"), ("prefill", "prompt lengths"), ("connections", "HTTP streams")):
        default = ",".join(map(str, getattr(Plan(), name)))
        group.add_argument(
            f"--{name}", type=_list(_count), metavar="N,N", help=f"{what} to measure [default: {default}]"
        )
    group.add_argument("--beside", type=_count, metavar="ROWS", help="rows beside which a chat is timed [default: 960]")
    group.add_argument("--rounds", type=_count, help="rounds of each measurement; medians are shown [default: 5]")
    group.add_argument("--quick", action="store_true", help="small batches and two short rounds")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file too")
    group.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"), help="measure nothing: show two such files side by side"
    )


def _list(item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(item(part.strip()) for part in text.split(","))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(PARTS)}")
    return text
