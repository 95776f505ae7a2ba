"""What is loaded before the first request is not looked through again for garbage."""

from __future__ import annotations

import subprocess
import sys

SETTLED = """
import gc
from rwkv_lightning.core.collector import THRESHOLDS, settle
loaded = [[number] for number in range(100_000)]
settle()
assert len(gc.get_objects()) < 1000 < gc.get_freeze_count()
assert gc.get_threshold() == THRESHOLDS and gc.isenabled()
ring = [None]
ring[0] = ring
del ring
assert gc.collect() >= 1  # what becomes garbage from then on is found
"""


def test_settling_leaves_out_what_exists_and_nothing_else() -> None:
    subprocess.run([sys.executable, "-c", SETTLED], check=True, timeout=60)
