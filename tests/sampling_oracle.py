"""The sampling rules in NumPy float64, one row at a time, written from native_api.md ("Samplers, exactly").

It knows nothing of the kernels. Where a draw lies within rounding of a boundary, `choices` names all defensible tokens.
Tokens are ordered by l - p, which orders softmax((l - p) / T) without its rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

NEAR = 1e-8  # how far a draw or a share may lie from a boundary and still be a matter of rounding
LIMIT = 1e308  # penalties saturate here


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), section 4.3."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        high_a, low_a = divmod(a * 0xD2511F53, 1 << 32)
        high_c, low_c = divmod(c * 0xCD9E8D57, 1 << 32)
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ m, low_a
        k, m = (k + 0x9E3779B9) % (1 << 32), (m + 0xBB67AE85) % (1 << 32)
    return [a, b, c, d]


@dataclass
class OracleRow:
    """One row of V tokens; `rule` is 'V1', 'V2' or 'temperature'."""

    rule: str
    vocabulary: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    decay: float = 1.0
    seed: int = 0
    row: int = 0
    exempt: Sequence[int] = ()
    position: int = 0
    drawn: np.ndarray = field(init=False)
    memory: np.ndarray = field(init=False)  # V1: penalties p; V2: counts c

    def __post_init__(self) -> None:
        self.drawn = np.zeros(self.vocabulary, bool)
        self.memory = np.zeros(self.vocabulary)

    def u(self) -> float:
        x0 = philox((self.position, self.row, 0, 0), (self.seed % 2**32, self.seed >> 32))[0]
        return (x0 + 0.5) * 2.0**-32

    def penalised(self, logits: np.ndarray) -> np.ndarray:
        l = logits.astype(np.float64)  # noqa: E741  (the contract's letter)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.rule == "V1":
                y = l - self.memory
            elif self.rule == "V2":
                y = l - self.presence * self.drawn - self.frequency * (self.decay * self.memory)
            else:
                y = l
        return np.where(np.isneginf(l), -np.inf, np.clip(y, -LIMIT, LIMIT))

    def weights(self, logits: np.ndarray, top_p: float) -> np.ndarray:
        """What each token weighs in the draw, [V]."""
        y = self.penalised(logits)
        with np.errstate(over="ignore"):
            q = np.exp((y - y.max()) / self.temperature)
        if self.rule == "V1":
            return self._v1(y, q / q.sum(), top_p)
        return self._v2(y, q, top_p) if self.rule == "V2" else q

    def _most(self) -> int:
        return self.vocabulary if not 0 < self.top_k <= self.vocabulary else self.top_k

    def _v1(self, y: np.ndarray, q: np.ndarray, top_p: float) -> np.ndarray:
        values, group, sizes = np.unique(-y, return_inverse=True, return_counts=True)  # descending in y
        number, mass = np.cumsum(sizes), np.cumsum(np.bincount(group, q))
        reached = (number >= self._most()) | (mass >= top_p)
        t = int(np.argmax(reached)) if reached.any() else len(values) - 1
        n_above, mass_above = (number[t - 1], mass[t - 1]) if t else (0, 0.0)
        of_t = q[group == t]
        f = min(1.0, (self._most() - n_above) / len(of_t))
        if of_t.sum() > 0 and t:
            f = min(f, (top_p - mass_above) / of_t.sum())
        if not t:
            f = 1.0  # only ties at the top: any factor gives the same shares
        return np.where(group < t, q, np.where(group == t, max(f, 0.0) * q, 0.0))

    def _v2(self, y: np.ndarray, q: np.ndarray, top_p: float) -> np.ndarray:
        order = np.argsort(-y, kind="stable")[: self._most()]
        mass = np.cumsum(q[order])
        enough = mass >= top_p * mass[-1]
        kept = order[: int(np.argmax(enough)) + 1 if enough.any() and top_p < 1 else len(order)]
        weights = np.zeros_like(q)
        weights[kept] = q[kept]
        return weights

    def greedy(self) -> bool:
        return self.temperature < 0.001 or (self.rule != "temperature" and self.top_p == 0)

    def choices(self, logits: np.ndarray) -> set[int]:
        """The tokens this draw may give: one, but for rounding; {-1} when the row cannot go on."""
        if np.isnan(logits).any() or not np.isfinite(logits.max()):
            return {-1}
        if self.greedy():
            return {int(np.argmax(self.penalised(logits)))}
        found: set[int] = set()
        shares = [self.top_p] if self.top_p == 1 else [self.top_p * (1 + e) for e in (-NEAR, 0.0, NEAR)]
        for top_p in shares:
            weights = self.weights(logits, top_p)
            passed = np.cumsum(weights) / weights.sum()
            before = np.concatenate([[0.0], passed[:-1]])
            hit = (weights > 0) & (before <= self.u() + NEAR) & (passed >= self.u() - NEAR)
            found |= set(np.flatnonzero(hit).tolist())
        return found

    def advance(self, token: int) -> None:
        self.position += 1
        self.memory *= self.decay
        if self.rule == "V1":
            grown = float(self.memory[token]) + (self.frequency if self.drawn[token] else self.presence)
            self.memory[token] = min(max(grown, -LIMIT), LIMIT)
        elif token not in self.exempt:
            self.memory[token] += 1
        self.drawn[token] = True
