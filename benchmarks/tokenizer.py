"""Encoding speed, ours against the `rwkv` package: ``python -m benchmarks.tokenizer [FILE]``.

Runs are interleaved and medians reported, in MB/s of UTF-8 text on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import document
from rwkv_lightning.core.text.vocabulary import Vocabulary, world_file
from rwkv_lightning.kernels import tokenizer

SAMPLES = {
    "English": "The quick brown fox jumps over the lazy dog, and 1,234 others looked on in (quiet) amazement.\n",
    "Chinese": "人工智能是计算机科学的一个分支，它企图了解智能的实质。\n",
    "mixed": "def f(x):\n    return x**2  # Größe, 日本語, Ελληνικά, русский, emoji 🙂👍\n",
}
ROUNDS = 5


def megabytes_per_second(encode: Callable[[bytes], object], data: bytes) -> float:
    start = time.perf_counter()
    encode(data)
    return len(data) / (time.perf_counter() - start) / 1e6


def compare(encoders: dict[str, Callable[[bytes], object]], data: dict[str, bytes]) -> dict[str, float]:
    runs: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(ROUNDS):
        for name, encode in encoders.items():
            runs[name].append(megabytes_per_second(encode, data[name]))
    return {name: statistics.median(values) for name, values in runs.items()}


def load_seconds() -> float:
    def once() -> float:
        start = time.perf_counter()
        Vocabulary.world()
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(ROUNDS))


def encoders() -> dict[str, Callable[[bytes], object]]:
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

    vocabulary = Vocabulary.world()
    ids = {token: number for number, token in enumerate(vocabulary.token_bytes) if token}
    theirs = TRIE_TOKENIZER(str(world_file()))
    return {
        "ours": vocabulary.encode_bytes,
        "ours, Python": tokenizer.PythonEncoder(ids).encode,
        "rwkv package": theirs.encodeBytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", type=document, nargs="?", help="text to encode; default: samples")
    file: Path | None = parser.parse_args().file
    samples = {name: text.encode() for name, text in SAMPLES.items()}
    if file:
        samples = {str(file): file.read_bytes()}
    print(f"loading the World vocabulary: {load_seconds() * 1e3:.0f} ms")
    forms = encoders()
    for label, text in samples.items():
        sizes = {"ours": 4_000_000}  # the others need a second for what ours does in a few milliseconds
        data = {name: text * max(1, sizes.get(name, 100_000) // len(text)) for name in forms}
        figures = compare(forms, data)
        print(f"{label:10}", *(f"{name} {value:.1f} MB/s" for name, value in figures.items()), sep="   ")


if __name__ == "__main__":
    main()
