"""Python's garbage collector, set for a process that has loaded what it needs and serves from then on."""

from __future__ import annotations

import gc

# Containers made, net, before the youngest are looked through; then every so many times the older ones too. A step of
# a thousand rows makes some thousand, which are gone when their events are sent: Python's 700 would look for nothing.
THRESHOLDS = 20_000, 20, 20


def settle() -> None:
    """Leave what exists by now out of all collections, and collect rarely.

    Some two hundred thousand objects come with the imports and the vocabulary; each full collection would look through
    them, which takes 100 ms, with the interpreter's lock.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
