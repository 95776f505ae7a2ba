"""Which rows of a request read the common beginnings of their prompts for the others."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence as Seq

from rwkv_lightning.core.sequence import Sequence

WIDTH = 4  # bytes of a packed token
LEAST_SHARED = 16  # tokens; reading fewer twice costs less than splitting a chunk


def share_prompts(rows: Seq[Sequence]) -> list[Sequence]:
    """Let rows follow others whose prompts begin alike; returns those that begin by themselves, in the rows' order.

    In sorted order a prompt shares most with the one before it. So that row, or the one that it follows that far
    itself, reads the common part for both.
    """
    packed = {row: struct.pack(f">{len(row.prompt)}I", *row.prompt) for row in rows}
    order = sorted(rows, key=lambda row: (_start(row), packed[row], row.row))
    leaders: dict[Sequence, Sequence] = {}
    for before, row in itertools.pairwise(order):
        shared = common_length(packed[before], packed[row])
        leader = before
        while leader in leaders and shared <= leader.fork_at:
            leader = leaders[leader]
        if may_follow(row, leader, shared):
            row.follow(leader, shared)
            leaders[row] = leader
    return [row for row in rows if row not in leaders]


def may_follow(row: Sequence, leader: Sequence, shared: int) -> bool:
    """Whether the leader comes past the state after `shared` tokens, and it is worth waiting for."""
    if _start(row) != _start(leader):
        return False
    if row.prompt == leader.prompt:
        return True
    if row.params.prompt_logprobs:  # each row needs the logits after every token of its prompt
        return False
    return shared >= leader.cached + LEAST_SHARED


def _start(row: Sequence) -> tuple[int, int]:
    """What must be equal for states to be equal, besides the tokens: the state that a row begins with."""
    return row.cached, 0 if row.snapshot is None else id(row.snapshot)


def common_length(one: bytes, other: bytes) -> int:
    """How many tokens two packed prompts begin with alike: a bisection over comparisons of whole runs of bytes."""
    low, high = 0, min(len(one), len(other)) // WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * WIDTH : middle * WIDTH] == other[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low
