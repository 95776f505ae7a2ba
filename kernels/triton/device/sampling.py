"""The sampling rules of native_api.md ("Samplers, exactly"), one program per row of logits.

A program scans its row in tiles, keeps the few tokens that can be drawn (in the order of ids), finds the cut among
them by bisection, and draws by inverse cumulative sum. Working memory per row: y, the penalised logits, and w, the
weights, both float64 [padded V], and the ids that were kept. All threads of a program meet at a barrier between
writing that memory and reading it. A row of `Row` is read as it lies in host memory, as words of 8 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rwkv_lightning.kernels.sampling_reference import GREEDY_BELOW
from rwkv_lightning.kernels.sampling_rows import PENALTY_LIMIT, RowState, Rule

V1 = tl.constexpr(int(Rule.V1))
V2 = tl.constexpr(int(Rule.V2))
TEMPERATURE = tl.constexpr(int(Rule.TEMPERATURE))
LIMIT = tl.constexpr(PENALTY_LIMIT)
GREEDY = tl.constexpr(GREEDY_BELOW)
REACH = tl.constexpr(64.0)  # tokens this many temperatures below the best weigh less than 1e-27 of it: left out
NO_TOKEN = tl.constexpr(2**31 - 1)
INF = tl.constexpr(float("inf"))
SIGN_LESS = tl.constexpr(2**63 - 1)

WORDS = tl.constexpr(RowState.position.offset // 8 + 1)  # of 8 bytes in a row
AT_TEMPERATURE = tl.constexpr(RowState.temperature.offset // 8)
AT_TOP_P = tl.constexpr(RowState.top_p.offset // 8)
AT_PRESENCE = tl.constexpr(RowState.presence.offset // 8)
AT_SEED = tl.constexpr(RowState.seed.offset // 8)
AT_TOP_K = tl.constexpr(RowState.top_k.offset // 8)
AT_POSITION = tl.constexpr(RowState.position.offset // 8)  # its low half; the row's index is the high half


@triton.jit
def _low(x):
    return x & 0xFFFFFFFF


@triton.jit
def uniform(seed, position, row):
    """u in (0, 1) of Philox4x32-10 (Salmon et al., 2011), key = seed, counter = (position, row, 0, 0); all uint64."""
    c0, c1 = position, row
    c2 = position & 0
    c3 = c2
    k0, k1 = _low(seed), seed >> 32
    for _ in tl.static_range(10):
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, _low(b), (a >> 32) ^ c3 ^ k1, _low(a)
        k0, k1 = _low(k0 + 0x9E3779B9), _low(k1 + 0xBB67AE85)
    return (c0.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit
def _spread(logits, y, vocabulary, padded, BLOCK: tl.constexpr):
    """y = the logits, -inf behind them. Whether there is a largest finite one, and no NaN."""
    lane = tl.arange(0, BLOCK)
    bad = tl.zeros([BLOCK], tl.int32)
    best = tl.full([BLOCK], -INF, tl.float32)
    for start in range(0, padded, BLOCK):
        value = tl.load(logits + start + lane, mask=start + lane < vocabulary, other=-INF)
        bad += tl.where((value != value) | (value == INF), 1, 0)
        best = tl.maximum(best, value)
        tl.store(y + start + lane, value.to(tl.float64))
    tl.debug_barrier()
    return (tl.sum(bad, 0) == 0) & (tl.max(best, 0) > -INF)


@triton.jit
def _penalise(y, ids, counted, first, last, presence, BLOCK: tl.constexpr):
    """y of the tokens drawn so far: less presence, less what depends on counts; saturated."""
    lane = tl.arange(0, BLOCK)
    for start in range(first, last, BLOCK):
        inside = start + lane < last
        token = tl.load(ids + start + lane, mask=inside, other=0)
        before = tl.load(y + token, mask=inside, other=0.0)
        after = before - presence - tl.load(counted + start + lane, mask=inside, other=0.0)
        after = tl.where(after > LIMIT, LIMIT, tl.where(after < -LIMIT, -LIMIT, after))
        tl.store(y + token, tl.where(before == -INF, before, after), mask=inside)
    tl.debug_barrier()


@triton.jit
def _lane_maxima(y, padded, BLOCK: tl.constexpr):
    """The largest value of every lane over all tiles, [BLOCK]: they stand for the row where a threshold is sought."""
    lane = tl.arange(0, BLOCK)
    lanes = tl.full([BLOCK], -INF, tl.float64)
    for start in range(0, padded, BLOCK):
        lanes = tl.maximum(lanes, tl.load(y + start + lane))
    return lanes


@triton.jit
def _first_equal(y, best, padded, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    found = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for start in range(0, padded, BLOCK):
        here = tl.load(y + start + lane) == best
        found = tl.minimum(found, tl.where(here, start + lane, NO_TOKEN))
    return tl.min(found, 0)


@triton.jit
def _weigh(y, w, best, temperature, padded, BLOCK: tl.constexpr):
    """w = exp((y - best) / T). Returns their sum."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, padded, BLOCK):
        weight = tl.exp((tl.load(y + start + lane) - best) / temperature)
        tl.store(w + start + lane, weight)
        total += weight
    tl.debug_barrier()
    return tl.sum(total, 0)


@triton.jit
def _threshold(lanes, wanted, lowest, best, BLOCK: tl.constexpr):
    """A value that at least `wanted` tokens reach, not many more where logits lie in no order; else `lowest`."""
    low = lowest
    if (wanted <= BLOCK // 2) & (tl.sum(tl.where(lanes >= lowest, 1, 0), 0) >= wanted):
        high = best
        for _ in range(24):
            middle = low + (high - low) * 0.5
            enough = tl.sum(tl.where(lanes >= middle, 1, 0), 0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    return low


@triton.jit
def _reaching(y, w, threshold, padded, BLOCK: tl.constexpr):
    """How many tokens reach the threshold, and their mass."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, padded, BLOCK):
        hit = tl.load(y + start + lane) >= threshold
        count += tl.where(hit, 1, 0)
        mass += tl.where(hit, tl.load(w + start + lane), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _keep(y, w, kept, threshold, padded, BLOCK: tl.constexpr):
    """Move the tokens that reach the threshold to the front of y and w, their ids to `kept`, in order. How many."""
    lane = tl.arange(0, BLOCK)
    n = tl.zeros([1], tl.int32).sum(0)
    for start in range(0, padded, BLOCK):
        value, weight = tl.load(y + start + lane), tl.load(w + start + lane)
        hit = value >= threshold
        place = n + tl.cumsum(tl.where(hit, 1, 0), 0) - 1
        tl.debug_barrier()  # the tile is read: places lie in it or before it
        tl.store(y + place, value, mask=hit)
        tl.store(w + place, weight, mask=hit)
        tl.store(kept + place, start + lane, mask=hit)
        n += tl.sum(tl.where(hit, 1, 0), 0)
    tl.debug_barrier()
    return n


@triton.jit
def _key(y):
    """An integer for every float64, in the same order; both zeros are one."""
    bits = tl.where(y == 0, 0.0, y).to(tl.int64, bitcast=True)
    return tl.where(bits < 0, bits ^ SIGN_LESS, bits)


@triton.jit
def _around(y, w, n, middle, BLOCK: tl.constexpr):
    """Of the first n tokens at or above `middle`: how many, mass, lowest key; and the highest key below it."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    lowest = tl.full([BLOCK], SIGN_LESS, tl.int64)
    below = tl.full([BLOCK], -SIGN_LESS, tl.int64)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        key = _key(tl.load(y + start + lane, mask=inside, other=-INF))
        above = inside & (key >= middle)
        count += tl.where(above, 1, 0)
        mass += tl.where(above, tl.load(w + start + lane, mask=inside, other=0.0), 0.0)
        lowest = tl.minimum(lowest, tl.where(above, key, SIGN_LESS))
        below = tl.maximum(below, tl.where(inside & (key < middle), key, -SIGN_LESS))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(lowest, 0), tl.max(below, 0)


@triton.jit
def _cut(y, w, n, floor, best, most, enough, BLOCK: tl.constexpr):
    """The largest t where {y >= t} holds `most` tokens or the mass `enough`, else the smallest of the n > 0 values.

    Returns its key, and number and mass of the tokens above it and from it on.
    """
    low, high = _key(floor), _key(best) + 1  # keys in [low, high); no bound is reached at `high`
    n_above, above = tl.zeros([1], tl.int32).sum(0), tl.zeros([1], tl.float64).sum(0)
    n_from, mass_from, lowest, below = _around(y, w, n, low, BLOCK)
    low = lowest
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count, mass, lowest, below = _around(y, w, n, middle, BLOCK)
        reached = (count >= most) | (mass >= enough)
        low = tl.where(reached, lowest, low)
        n_from, mass_from = tl.where(reached, count, n_from), tl.where(reached, mass, mass_from)
        high = tl.where(reached, high, below + 1)
        n_above, above = tl.where(reached, n_above, count), tl.where(reached, above, mass)
    return low, n_above, above, n_from, mass_from


@triton.jit
def _scale(y, w, n, cut, factor, BLOCK: tl.constexpr):
    """V1: weights at the cut are scaled, those below it dropped."""
    lane = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        key = _key(tl.load(y + start + lane, mask=inside, other=-INF))
        weight = tl.load(w + start + lane, mask=inside, other=0.0)
        weight = tl.where(key > cut, weight, tl.where(key == cut, factor * weight, 0.0))
        tl.store(w + start + lane, weight, mask=inside)
    tl.debug_barrier()


@triton.jit
def _keep_first(y, w, n, cut, quota, BLOCK: tl.constexpr):
    """V2: of the tokens at the cut only the first `quota` stay, below it none. Returns the mass that stays."""
    lane = tl.arange(0, BLOCK)
    seen = tl.zeros([1], tl.int32).sum(0)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(y + start + lane, mask=inside, other=-INF)
        weight = tl.load(w + start + lane, mask=inside, other=0.0)
        equal = inside & (_key(value) == cut)
        rank = seen + tl.cumsum(tl.where(equal, 1, 0), 0)
        stays = inside & ((_key(value) > cut) | (equal & (rank <= quota)))
        seen += tl.sum(tl.where(equal, 1, 0), 0)
        weight = tl.where(stays, weight, 0.0)
        mass += weight
        tl.store(y + start + lane, tl.where(stays, value, -INF), mask=inside)
        tl.store(w + start + lane, weight, mask=inside)
    tl.debug_barrier()
    return tl.sum(mass, 0)


@triton.jit
def _pick(w, n, u, BLOCK: tl.constexpr):
    """Inverse cumulative sum: where the running sum of the n weights first exceeds u times their total."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        total += tl.load(w + start + lane, mask=start + lane < n, other=0.0)
    target = u * tl.sum(total, 0)
    passed = tl.zeros([1], tl.float64).sum(0)
    found = tl.full([BLOCK], NO_TOKEN, tl.int32)
    last = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        weight = tl.load(w + start + lane, mask=start + lane < n, other=0.0)
        running = passed + tl.cumsum(weight, 0)
        found = tl.minimum(found, tl.where((weight > 0) & (running > target), start + lane, NO_TOKEN))
        last = tl.maximum(last, tl.where(weight > 0, start + lane, 0))
        passed += tl.sum(weight, 0)
    return tl.minimum(tl.min(found, 0), tl.max(last, 0))


@triton.jit
def _choose_v1(y, w, n, floor, best, most, enough, BLOCK: tl.constexpr):
    cut, n_above, above, n_from, mass_from = _cut(y, w, n, floor, best, most, enough, BLOCK)
    at_cut = mass_from - above
    room = (most - n_above).to(tl.float64) / (n_from - n_above).to(tl.float64)
    share = tl.where(at_cut > 0, (enough - above) / tl.where(at_cut > 0, at_cut, 1.0), 1.0)
    factor = tl.minimum(tl.minimum(room, share), 1.0)
    _scale(y, w, n, cut, tl.where(n_above > 0, factor, 1.0), BLOCK)  # only ties: any factor gives the same shares


@triton.jit
def _choose_v2(y, w, n, floor, best, most, share, enough, vocabulary, BLOCK: tl.constexpr):
    limit = enough
    if most < vocabulary:
        cut, n_above, above, n_from, mass_from = _cut(y, w, n, floor, best, most, INF, BLOCK)
        limit = share * _keep_first(y, w, n, cut, most - n_above, BLOCK)
    if limit < INF:
        cut, n_above, above, n_from, mass_from = _cut(y, w, n, best - INF, best, vocabulary + 1, limit, BLOCK)
        each = (mass_from - above) / tl.maximum(n_from - n_above, 1).to(tl.float64)
        quota = tl.ceil((limit - above) / tl.where(each > 0, each, 1.0))
        quota = tl.where(each > 0, tl.minimum(quota, (n_from - n_above).to(tl.float64)), 1.0)
        _keep_first(y, w, n, cut, tl.maximum(quota, 1.0).to(tl.int32), BLOCK)


@triton.jit
def _choose(y, w, kept, lanes, best, temperature, most, share, total, padded, vocabulary, RULE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Leave the weights of the draw at the front of w, and their ids in `kept`. Returns how many."""
    enough = share * total
    bound = enough
    if RULE == V2:
        bound = tl.where(most < vocabulary, INF, enough)  # the mass bound counts after the K largest are chosen
    lowest = best - temperature * REACH
    wanted = tl.where(bound < INF, tl.minimum(most, 64), most)
    threshold = _threshold(lanes, wanted, lowest, best, BLOCK)
    count, mass = _reaching(y, w, threshold, padded, BLOCK)
    while (threshold > lowest) & (count < most) & (mass < bound):
        wanted = wanted * 4
        threshold = _threshold(lanes, wanted, lowest, best, BLOCK)
        count, mass = _reaching(y, w, threshold, padded, BLOCK)
    n = _keep(y, w, kept, threshold, padded, BLOCK)
    if RULE == V1:
        _choose_v1(y, w, n, threshold, best, most, enough, BLOCK)
    else:
        _choose_v2(y, w, n, threshold, best, most, share, enough, vocabulary, BLOCK)
    return n


@triton.jit(do_not_specialize=["vocabulary"])
def draw(
    logits, stride, vocabulary, padded, words, numbers, starts, ids, counted, y, w, kept, tokens,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tokens[row] = the row's draw, -1 where its logits hold NaN, +inf or nothing finite: grid (rows,).

    words and numbers are the rows' memory as int64 and as float64; ids and counted the penalties of row i from
    starts[i] to starts[i + 1].
    """
    row = tl.program_id(0).to(tl.int64)
    y, w, kept = y + row * padded, w + row * padded, kept + row * padded
    words, numbers = words + row * WORDS, numbers + row * WORDS
    temperature, top_p = tl.load(numbers + AT_TEMPERATURE), tl.load(numbers + AT_TOP_P)
    token = tl.full([1], -1, tl.int32).sum(0)
    if _spread(logits + row * stride, y, vocabulary, padded, BLOCK):
        greedy = temperature < GREEDY
        if RULE != TEMPERATURE:
            greedy = greedy | (top_p <= 0)
            presence = tl.load(numbers + AT_PRESENCE) if RULE == V2 else 0.0
            _penalise(y, ids, counted, tl.load(starts + row), tl.load(starts + row + 1), presence, BLOCK)
        lanes = _lane_maxima(y, padded, BLOCK)
        best = tl.max(lanes, 0)
        if greedy:
            token = _first_equal(y, best, padded, BLOCK)
        else:
            total = _weigh(y, w, best, temperature, padded, BLOCK)
            place = tl.load(words + AT_POSITION).to(tl.uint64, bitcast=True)
            u = uniform(tl.load(words + AT_SEED).to(tl.uint64, bitcast=True), _low(place), place >> 32)
            if RULE == TEMPERATURE:
                token = _pick(w, padded, u, BLOCK)
            else:
                top_k = tl.load(words + AT_TOP_K)
                most = tl.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k).to(tl.int32)
                share = tl.where(top_p < 1, top_p, INF)
                n = _choose(y, w, kept, lanes, best, temperature, most, share, total, padded, vocabulary, RULE, BLOCK)
                token = tl.load(kept + _pick(w, n, u, BLOCK))
    tl.store(tokens + row, token)
