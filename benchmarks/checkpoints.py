"""Make random RWKV-7 checkpoints in the official layout (core/random_checkpoint.py).

python -m benchmarks.checkpoints 0.1b out.pth
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from rwkv_lightning.core.random_checkpoint import SHAPES, ModelShape, make, random_weights, save

__all__ = ["SHAPES", "ModelShape", "make", "random_weights", "save"]


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make a random RWKV-7 checkpoint in the official layout.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path, help="ends in .pth or .safetensors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args(arguments)
    make(options.path, options.shape, options.seed, getattr(torch, options.dtype))
    millions = SHAPES[options.shape].parameters() / 1e6
    print(f"{options.path}: {millions:,.1f} M parameters, {options.path.stat().st_size / 1e6:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
