// Greedy longest-match tokenization over bytes: a trie whose edges live in one open-addressing hash table.
//
// A table keeps a vocabulary of 65k tokens in a few megabytes and needs no construction beyond insertion; the hot
// edges of a text stay in the processor's caches. A finished trie is only read, so any number of threads may share it.

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace {

struct Edge {
    uint64_t key = 0;    // parent node * 256 + byte
    int32_t child = 0;   // 0 marks a free entry: the root is nobody's child
    int32_t token = -1;  // id of the token that ends at the child, or -1
};

class Trie {
public:
    explicit Trie(int64_t total_bytes) {
        int bits = 10;
        while ((int64_t{1} << bits) < 2 * total_bytes) ++bits;  // at most half full: probes stay short
        shift_ = 64 - bits;
        edges_.resize(size_t{1} << bits);
    }

    void insert(const uint8_t* bytes, int64_t length, int32_t token) {
        Edge* edge = nullptr;
        int32_t node = 0;
        for (int64_t i = 0; i < length; ++i) {
            edge = &edges_[slot(node, bytes[i])];
            if (edge->child == 0) *edge = Edge{key(node, bytes[i]), ++nodes_, -1};
            node = edge->child;
        }
        if (edge != nullptr) edge->token = token;
    }

    // Writes the ids to `out` and returns how many, or -1 - position where no token matches.
    int64_t encode(const uint8_t* data, int64_t length, int32_t* out) const {
        int64_t count = 0;
        for (int64_t start = 0; start < length;) {
            int32_t node = 0;
            int32_t best = -1;
            int64_t end = start;
            for (int64_t i = start; i < length; ++i) {
                const Edge& edge = edges_[slot(node, data[i])];
                if (edge.child == 0) break;
                node = edge.child;
                if (edge.token >= 0) {
                    best = edge.token;
                    end = i + 1;
                }
            }
            if (best < 0) return -1 - start;
            out[count++] = best;
            start = end;
        }
        return count;
    }

private:
    static uint64_t key(int32_t node, uint8_t byte) { return static_cast<uint64_t>(node) << 8 | byte; }

    // The entry of this edge, or the free entry where it belongs.
    size_t slot(int32_t node, uint8_t byte) const {
        const uint64_t wanted = key(node, byte);
        const size_t mask = edges_.size() - 1;
        size_t at = static_cast<size_t>(wanted * 0x9E3779B97F4A7C15u >> shift_);  // Fibonacci hashing
        while (edges_[at].child != 0 && edges_[at].key != wanted) at = (at + 1) & mask;
        return at;
    }

    std::vector<Edge> edges_;
    int shift_ = 0;
    int32_t nodes_ = 0;
};

}  // namespace

extern "C" {

// Token i has the bytes [offsets[i], offsets[i + 1]) and the id ids[i] >= 0. Returns null when memory runs out.
void* tokenizer_build(const uint8_t* bytes, const int64_t* offsets, const int32_t* ids, int64_t count) {
    try {
        auto* trie = new Trie(offsets[count]);
        for (int64_t i = 0; i < count; ++i) trie->insert(bytes + offsets[i], offsets[i + 1] - offsets[i], ids[i]);
        return trie;
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

// `out` has room for `length` ids.
int64_t tokenizer_encode(const void* trie, const uint8_t* data, int64_t length, int32_t* out) {
    return static_cast<const Trie*>(trie)->encode(data, length, out);
}

void tokenizer_free(void* trie) { delete static_cast<Trie*>(trie); }
}
