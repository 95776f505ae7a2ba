// Draws the next token of many rows: the rules V1, V2 and temperature-only of native_api.md, "Samplers, exactly".
//
// Per row: scan the logits once, in blocks of 64; gather the few tokens that can be drawn; find the cut among them;
// draw by inverse cumulative sum in the order of ids. Penalised logits are kept in double beside the row, which holds
// -inf at their places meanwhile, so that equal values stay equal and small penalties are not rounded away.

#include "sampling_select.h"

namespace {

using namespace sampling;

// Mirrors RowState in kernels/sampling_rows.py.
struct Row {
    double temperature, top_p, presence, frequency, decay;
    uint64_t seed;
    int64_t top_k;
    int32_t* ids;     // tokens drawn so far, ascending
    double* values;   // V1: their penalties; V2: their decaying counts
    int32_t count, capacity;
    uint32_t position, row;
};

enum Rule { V1 = 1, V2 = 2, TEMPERATURE = 3 };

constexpr double LIMIT = 1e308;  // penalties saturate here instead of becoming infinite
constexpr double GREEDY_BELOW = 0.001;

double saturate(double x) { return x > LIMIT ? LIMIT : x < -LIMIT ? -LIMIT : x; }

double penalised_logit(Rule rule, const Row& row, int i, float logit) {
    if (logit == -FLOAT_INF) return -DOUBLE_INF;
    if (rule == V1) return logit - row.values[i];
    // Rounded on its own (no fused multiply-add), as the reference rounds it: ties must stay ties.
    volatile double counted = row.frequency * (row.decay * row.values[i]);
    return saturate(logit - row.presence - counted);
}

// Takes the penalised tokens out of the logits while it lives.
struct Hidden {
    float* logits;
    const Row& row;
    Scratch& scratch;
    int count;
    bool legal = true;          // no NaN and no +inf among them
    double best = -DOUBLE_INF;  // their largest penalised logit

    Hidden(Rule rule, float* logits, const Row& row, Scratch& scratch)
        : logits(logits), row(row), scratch(scratch), count(rule == TEMPERATURE ? 0 : row.count) {
        for (int i = 0; i < count; ++i) {
            const float logit = logits[row.ids[i]];
            scratch.hidden[i] = logit;
            logits[row.ids[i]] = -FLOAT_INF;
            legal &= logit < FLOAT_INF;
            const double y = scratch.penalised[i] = penalised_logit(rule, row, i, logit);
            best = y > best ? y : best;
        }
    }
    ~Hidden() {
        for (int i = 0; i < count; ++i) logits[row.ids[i]] = scratch.hidden[i];
    }

    // The first token whose value is the best, over both parts.
    int first_best(const Blocks& blocks, float bulk_best) const {
        int id = blocks.vocabulary;
        if (bulk_best >= best) {
            int b = 0;
            while (blocks.scratch.block_max[b] != bulk_best) ++b;
            const float* l = blocks.block(b);
            id = b * BLOCK + int(std::find(l, l + BLOCK, bulk_best) - l);
        }
        if (best >= bulk_best)
            for (int i = 0; i < count; ++i)
                if (scratch.penalised[i] == best) return std::min(id, row.ids[i]);
        return id;
    }

    // Merges the penalised tokens that reach the threshold into the n candidates, in the order of ids.
    int merge(int n, double threshold) {
        int extra = 0;
        for (int i = 0; i < count; ++i) extra += scratch.penalised[i] >= threshold;
        int from = n - 1, to = n + extra - 1;
        for (int i = count - 1; i >= 0 && to > from; --i) {
            if (!(scratch.penalised[i] >= threshold)) continue;
            for (; from >= 0 && scratch.id[from] > row.ids[i]; --from, --to)
                scratch.id[to] = scratch.id[from], scratch.y[to] = scratch.y[from];
            scratch.id[to] = row.ids[i], scratch.y[to--] = scratch.penalised[i];
        }
        return n + extra;
    }
};

// One row's draw by V1 or V2.
struct Draw {
    const Row& row;
    Blocks& blocks;
    Hidden& hidden;
    Scratch& s;
    float bulk_best;
    double best;       // m: the largest penalised logit
    int n = 0;         // candidates in s.id, s.y and s.weight = exp((y - m) / T)
    double mass = 0;   // of the candidates
    bool all = false;  // every token within reach is among them

    // Makes at least the `wanted` largest tokens the candidates.
    void collect(int64_t wanted) {
        const double within = best - REACH * row.temperature;
        const float lowest = std::max((float)within, -std::numeric_limits<float>::max());
        const float threshold = blocks.threshold(wanted, lowest, bulk_best);
        all = threshold == lowest;
        n = hidden.merge(blocks.gather(threshold), all ? within : threshold);
        const double scale = LOG2E / row.temperature;
        for (int i = 0; i < n; i += 8)
            store(&s.weight[i], exp2_double((load<F64x8>(&s.y[i]) - best) * scale));
        sum();
    }

    void sum() {
        mass = 0;
        for (int i = 0; i < n; ++i) mass += s.weight[i];
    }

    // The mass of the whole vocabulary.
    double whole() {
        if (all) return mass;
        double z = blocks.weigh(best, row.temperature);
        for (int i = 0; i < hidden.count; i += 8) {
            F64x8 x = (load<F64x8>(&s.penalised[i]) - best) * (LOG2E / row.temperature);
            for (int lane = hidden.count - i; lane < 8; ++lane) x[lane] = -DOUBLE_INF;
            z += total(exp2_double(x));
        }
        return z;
    }

    // Collects until the candidates hold `most` tokens or the share top_p of everything. Returns that mass.
    double collect_share(int64_t most) {
        double enough = DOUBLE_INF;
        for (int64_t wanted = row.top_p < 1.0 ? std::min<int64_t>(most, 64) : most;; wanted *= 4) {
            collect(wanted);
            if (row.top_p < 1.0 && enough == DOUBLE_INF) enough = row.top_p * whole();
            if (all || n >= most || mass >= enough) return enough;
        }
    }

    void keep_scaled(const Cut& cut, double factor) {
        for (int i = 0; i < n; ++i)
            s.weight[i] = s.y[i] > cut.value ? s.weight[i] : s.y[i] == cut.value ? factor * s.weight[i] : 0.0;
    }

    // Keeps the tokens above the cut and the first `quota` at it.
    void keep_first(const Cut& cut, int64_t quota) {
        int kept = 0;
        for (int i = 0; i < n; ++i) {
            const bool stays = s.y[i] > cut.value || (s.y[i] == cut.value && quota-- > 0);
            s.id[kept] = s.id[i], s.y[kept] = s.y[i], s.weight[kept] = s.weight[i];
            kept += stays;
        }
        n = kept;
        sum();
    }

    void choose_v1(int64_t most) {
        const double enough = collect_share(most);
        const Cut cut = find_cut(s, n, most, enough);
        if (!cut.n_above) return keep_scaled(cut, 1.0);  // only ties: any factor gives the same shares
        const double room = double(most - cut.n_above) / cut.n_equal;
        keep_scaled(cut, std::min({1.0, room, (enough - cut.above) / (cut.weight * cut.n_equal)}));
    }

    void choose_v2(int64_t most) {
        double enough = DOUBLE_INF;
        if (most >= blocks.vocabulary) {
            enough = collect_share(most);
        } else {
            collect(most);
            if (n > most) {
                const Cut cut = find_cut(s, n, most, DOUBLE_INF);
                keep_first(cut, most - cut.n_above);
            }
            if (row.top_p < 1.0) enough = row.top_p * mass;
        }
        if (enough == DOUBLE_INF) return;
        const Cut cut = find_cut(s, n, std::numeric_limits<int64_t>::max(), enough);
        int64_t quota = 1;
        while (quota < cut.n_equal && cut.above + quota * cut.weight < enough) ++quota;
        keep_first(cut, quota);
    }

    int pick(double u) {
        sum();
        const double target = u * mass;
        double passed = 0;
        int last = 0;
        for (int i = 0; i < n; ++i) {
            if (!(s.weight[i] > 0)) continue;
            last = s.id[i];
            passed += s.weight[i];
            if (passed > target) break;
        }
        return last;
    }
};

// Draws from softmax(l / T) over the whole row: first the block, then the token in it.
int pick_dense(Blocks& blocks, double best, double temperature, double u) {
    Scratch& s = blocks.scratch;
    double target = u * blocks.weigh(best, temperature);
    int b = 0, last = 0;
    for (int i = 0; i < blocks.count; ++i) {
        if (!(s.block_mass[i] > 0)) continue;
        b = i;
        if (s.block_mass[i] > target) break;
        target -= s.block_mass[i];
    }
    double weight[BLOCK], passed = 0;
    for (int i = 0; i < BLOCK; i += 8)
        store(&weight[i], exp2_double((widen(blocks.block(b) + i) - best) * (LOG2E / temperature)));
    for (int i = 0; i < BLOCK && !(passed > target); ++i) {
        if (weight[i] > 0) last = i;
        passed += weight[i];
    }
    return b * BLOCK + last;
}

int draw(Rule rule, float* logits, int vocabulary, const Row& row, Scratch& scratch) {
    scratch.reserve(vocabulary, row.count);
    Hidden hidden(rule, logits, row, scratch);
    Blocks blocks(logits, vocabulary, scratch);
    const bool greedy = row.temperature < GREEDY_BELOW || (rule != TEMPERATURE && row.top_p <= 0);
    const int64_t most = row.top_k <= 0 || row.top_k > vocabulary ? vocabulary : row.top_k;
    const bool bounded = rule == V2 && most < vocabulary;
    const bool sums = !greedy && (rule == TEMPERATURE || (row.top_p < 1.0 && !bounded));
    const float bulk_best = blocks.scan(sums, row.temperature);
    const double best = std::max<double>(bulk_best, hidden.best);
    if (!hidden.legal || !(bulk_best < FLOAT_INF) || best == -DOUBLE_INF) return -1;
    if (greedy) return hidden.first_best(blocks, bulk_best);
    const double u = uniform(row.seed, row.position, row.row);
    if (rule == TEMPERATURE) return pick_dense(blocks, best, row.temperature, u);
    Draw chosen{row, blocks, hidden, scratch, bulk_best, best};
    rule == V1 ? chosen.choose_v1(most) : chosen.choose_v2(most);
    return chosen.pick(u);
}

// The row's place of a token, made if need be (with the value 0); `added` says whether it was.
int place(Row& row, int token, bool& added) {
    const int at = int(std::lower_bound(row.ids, row.ids + row.count, token) - row.ids);
    added = at == row.count || row.ids[at] != token;
    if (added) {
        std::memmove(row.ids + at + 1, row.ids + at, (row.count - at) * sizeof(*row.ids));
        std::memmove(row.values + at + 1, row.values + at, (row.count - at) * sizeof(*row.values));
        row.ids[at] = token, row.values[at] = 0;
        ++row.count;
    }
    return at;
}

void advance(Rule rule, Row& row, int token, const int32_t* exempt, int n_exempt) {
    ++row.position;
    if (rule == TEMPERATURE) return;
    for (int i = 0; i < row.count; ++i) row.values[i] *= row.decay;
    bool added;
    double& value = row.values[place(row, token, added)];
    if (rule == V1)
        value = saturate(value + (added ? row.presence : row.frequency));
    else if (std::find(exempt, exempt + n_exempt, token) == exempt + n_exempt)
        value += 1;
}

// Lists the rows that have no place for one more token; returns how many.
int list_full(int rule, int n, const uint64_t* rows, int32_t* full) {
    int found = 0;
    for (int r = 0; r < n; ++r) {
        const Row& row = *reinterpret_cast<Row*>(rows[r]);
        if (rule != TEMPERATURE && row.count == row.capacity) full[found++] = r;
    }
    return found;
}

}  // namespace

// Draws one token per row of logits [n, vocabulary] (row r at logits + r * stride) into tokens [n] and advances the
// rows. -1: the row's logits hold NaN, +inf or nothing finite; it is not advanced. Rows that are full now and must
// grow before the next call are listed in full [n]; returns how many. The logits are left as they were.
extern "C" int rwkv_sample(int rule, float* logits, int64_t stride, int n, int vocabulary, const uint64_t* rows,
                           const int32_t* exempt, int n_exempt, int threads, int32_t* tokens, int32_t* full) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n > 1 && threads > 1)
    for (int r = 0; r < n; ++r) {
        static thread_local Scratch scratch;
        Row& row = *reinterpret_cast<Row*>(rows[r]);
        tokens[r] = draw(Rule(rule), logits + r * stride, vocabulary, row, scratch);
        if (tokens[r] >= 0) advance(Rule(rule), row, tokens[r], exempt, n_exempt);
    }
    return list_full(rule, n, rows, full);
}

// Advances n rows by tokens [n] that were drawn elsewhere; a negative one leaves its row as it is. `full` as above.
extern "C" int rwkv_advance(int rule, int n, const uint64_t* rows, const int32_t* tokens, const int32_t* exempt,
                            int n_exempt, int threads, int32_t* full) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 64 && threads > 1)
    for (int r = 0; r < n; ++r)
        if (tokens[r] >= 0) advance(Rule(rule), *reinterpret_cast<Row*>(rows[r]), tokens[r], exempt, n_exempt);
    return list_full(rule, n, rows, full);
}
