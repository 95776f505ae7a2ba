"""The sampling rules of native_api.md ("Samplers, exactly") in plain PyTorch, in float64 on the logits' device.

Serves where there is no compiler and on GPUs, and is what the C++ kernel is compared with. Shapes: n rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rwkv_lightning.kernels.sampling_rows import PENALTY_LIMIT, Row, Rule

GREEDY_BELOW = 0.001  # temperatures under it mean the largest penalised logit
ROWS_AT_ONCE = 64  # bounds the float64 copies of the logits


def uniform(seed: int, position: int, row: int) -> float:
    """u in (0, 1) of Philox4x32-10 (Salmon et al., 2011), key = seed, counter = (position, row, 0, 0)."""
    c0, c1, c2, c3 = position, row, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (c0 + 0.5) * 2.0**-32


def sample(rule: Rule, logits: torch.Tensor, rows: Sequence[Row], exempt: Sequence[int] = ()) -> list[int]:
    """As `sampling.sample`: float32 logits [len(rows), V] -> token ids, -1 for a row without a largest finite logit."""
    tokens: list[int] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        drawn = _draw(rule, logits[start : start + ROWS_AT_ONCE], part)
        for row, token in zip(part, drawn, strict=True):
            if token >= 0:
                advance_row(rule, row, token, exempt)
        tokens += drawn
    return tokens


def _draw(rule: Rule, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    legal = ~logits.isnan().any(1) & logits.amax(1).isfinite()
    y = _penalised(rule, torch.where(legal[:, None], logits, 0.0).double(), rows)
    greedy = torch.tensor([_is_greedy(rule, row) for row in rows], device=y.device)
    best = (y == y.amax(1, keepdim=True)).int().argmax(1)  # the first of equals
    temperature = _column(y, [max(row.state.temperature, GREEDY_BELOW) for row in rows])
    weights = torch.exp((y - y.amax(1, keepdim=True)) / temperature)
    if rule is Rule.V1:
        weights = _keep_v1(y, weights, rows)
    elif rule is Rule.V2:
        weights = _keep_v2(y, weights, rows)
    u = _column(y, [uniform(row.state.seed, row.state.position, row.state.row) for row in rows])
    tokens: list[int] = torch.where(legal, torch.where(greedy, best, _pick(weights, u)), -1).tolist()
    return tokens


def _column(y: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """One value per row: [n, 1] in the type and on the device of y."""
    return torch.tensor(values, dtype=y.dtype, device=y.device)[:, None]


def _is_greedy(rule: Rule, row: Row) -> bool:
    return row.state.temperature < GREEDY_BELOW or (rule is not Rule.TEMPERATURE and row.state.top_p <= 0)


def _penalised(rule: Rule, y: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Subtract the rows' penalties from y [n, V], in place."""
    if rule is Rule.TEMPERATURE:
        return y
    ids = np.concatenate([row.penalties()[0] for row in rows])
    where = np.repeat(np.arange(len(rows)), [row.state.count for row in rows])
    cells = torch.from_numpy(where).to(y.device), torch.from_numpy(ids.astype(np.int64)).to(y.device)
    presence, counted = np.zeros(len(ids)), np.concatenate([_counted(rule, row) for row in rows])
    if rule is Rule.V2:
        presence = np.repeat([row.state.presence for row in rows], [row.state.count for row in rows])
    before = y[cells]
    after = before - torch.from_numpy(presence).to(y.device) - torch.from_numpy(counted).to(y.device)
    y[cells] = torch.where(before.isneginf(), before, after.clamp(-PENALTY_LIMIT, PENALTY_LIMIT))
    return y


def _counted(rule: Rule, row: Row) -> np.ndarray:
    """The part of a row's penalties that depends on counts."""
    values = row.penalties()[1]
    if rule is Rule.V1:
        return values
    with np.errstate(over="ignore"):
        return np.asarray(row.state.frequency * (row.state.decay * values))


def _bounds(y: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's K and top_p, [n, 1]; a top_p of 1 is no bound, whatever rounding makes of the sum."""
    vocabulary = y.shape[1]
    most = [row.state.top_k if 0 < row.state.top_k <= vocabulary else vocabulary for row in rows]
    share = [row.state.top_p if row.state.top_p < 1 else torch.inf for row in rows]
    return _column(y, most).long(), _column(y, share)


def _keep_v1(y: torch.Tensor, weights: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Weights above the value t at which K tokens or the mass top_p are reached; scaled by f at it, 0 below."""
    most, share = _bounds(y, rows)
    enough = share * weights.sum(1, keepdim=True)
    ordered, order = y.sort(dim=1, descending=True)
    mass = weights.gather(1, order).cumsum(1)
    crossing = torch.minimum((mass < enough).sum(1, keepdim=True), most - 1).clamp(max=y.shape[1] - 1)
    t = ordered.gather(1, crossing)
    above, equal = y > t, y == t
    n_equal = equal.sum(1, keepdim=True)
    f_count = (most - above.sum(1, keepdim=True)) / n_equal
    mass_equal = torch.where(equal, weights, 0.0).sum(1, keepdim=True)
    f_mass = (enough - torch.where(above, weights, 0.0).sum(1, keepdim=True)) / mass_equal
    f = torch.minimum(f_count, torch.where(mass_equal > 0, f_mass, 1.0)).clamp(max=1.0)
    f = torch.where(above.any(1, keepdim=True), f, 1.0)  # only ties: any factor gives the same shares
    return torch.where(above, weights, torch.where(equal, f * weights, 0.0))


def _keep_v2(y: torch.Tensor, weights: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """The K largest, lowest ids first on ties; of those the fewest, largest first, that reach the share top_p."""
    most, share = _bounds(y, rows)
    order = y.sort(dim=1, descending=True, stable=True).indices
    rank = torch.arange(y.shape[1], device=y.device)
    kept = torch.where(rank < most, weights.gather(1, order), 0.0)
    mass = kept.cumsum(1)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], 1)
    kept = torch.where(before < share * mass[:, -1:], kept, 0.0)
    return torch.zeros_like(weights).scatter(1, order, kept)


def _pick(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse cumulative sum in the order of ids: [n] the first token whose cumulative weight exceeds u * total."""
    passed = weights.cumsum(1)
    token = (passed <= u * passed[:, -1:]).sum(1)
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(1)
    return torch.minimum(token, last)


def advance_row(rule: Rule, row: Row, token: int, exempt: Sequence[int]) -> None:
    """Count the drawn token: decay what was drawn before, then add to its penalty (V1) or count (V2)."""
    state = row.state
    state.position += 1
    if rule is Rule.TEMPERATURE:
        return
    values = row.penalties()[1]
    values *= state.decay
    at, added = row.place(token)
    if rule is Rule.V1:
        grown = float(row.values[at]) + (state.presence if added else state.frequency)
        row.values[at] = min(max(grown, -PENALTY_LIMIT), PENALTY_LIMIT)
    elif token not in exempt:
        row.values[at] += 1.0
