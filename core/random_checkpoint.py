"""Random RWKV-7 checkpoints in the official layout: real shapes for benchmarks, small ones for tests.

The weights are noise, but of the sizes a trained model has: activations stay finite over any length, heads forget at
different speeds, and logits spread over a few units. The same shape and seed give the same weights everywhere.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from rwkv_lightning.core.layout import layer_count, official_shapes
from rwkv_lightning.kernels.cpu.build import cache_dir

HEAD_SIZE = 64
WORLD_ROWS = 65536


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; `n_ffn` 0 means four times the width. Ranks: see core/layout.py."""

    n_layer: int
    n_embd: int
    rank_w: int
    rank_a: int
    rank_v: int
    rank_g: int
    vocab_size: int = WORLD_ROWS
    n_ffn: int = 0
    head_size: int = HEAD_SIZE

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape."""
        sizes = {"V": self.vocab_size, "C": self.n_embd, "F": self.n_ffn or 4 * self.n_embd}
        sizes |= {"H": self.n_embd // self.head_size, "N": self.head_size}
        sizes |= {"w": self.rank_w, "a": self.rank_a, "v": self.rank_v, "g": self.rank_g}
        return official_shapes(self.n_layer, sizes)

    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.tensors().values())


# Ranks: RWKV-7 paper (arXiv 2503.14456), appendix on architecture; they grow with the width.
SHAPES = {
    "tiny": ModelShape(2, 128, 16, 16, 16, 32, vocab_size=320),
    "0.1b": ModelShape(12, 768, 64, 64, 32, 128),
    "0.4b": ModelShape(24, 1024, 64, 64, 32, 128),
    "1.5b": ModelShape(24, 2048, 96, 96, 64, 256),
    "2.9b": ModelShape(32, 2560, 96, 96, 64, 320),
    "7.2b": ModelShape(32, 4096, 128, 128, 96, 480),
    "13.3b": ModelShape(61, 4096, 128, 128, 96, 480),
}


def random_weights(
    shape: str | ModelShape, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """The tensors of a random model of a named or own shape."""
    tensors = (SHAPES[shape] if isinstance(shape, str) else shape).tensors()
    depth = layer_count(tensors)
    return {name: _random(name, size, depth, seed).to(dtype) for name, size in tensors.items()}


def make(path: Path, shape: str | ModelShape, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random checkpoint, `.pth` or `.safetensors` by the path's suffix, and return its path."""
    save(random_weights(shape, seed, dtype), path)
    return path


def kept(shape: str) -> Path:
    """The random checkpoint of a named shape, made once per user and kept in the cache folder.

    One with fewer rows than the World vocabulary has a vocabulary of single bytes beside it.
    """
    path = cache_dir() / "benchmarks" / f"random-{shape}.pth"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.stem}-{os.getpid()}.pth")  # another process may make it too
        if SHAPES[shape].vocab_size < WORLD_ROWS:
            lines = (f"{byte + 1} {bytes([byte])!r} 1\n" for byte in range(256))
            path.with_suffix(".vocab.txt").write_text("".join(lines))
        os.replace(make(part, shape, seed=1), path)
    return path


def save(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors in the format that the path's suffix names. Raises ValueError for another suffix."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(weights, path)
    elif path.suffix == ".pth":
        torch.save(weights, path)
    else:
        raise ValueError(f"'{path}' ends in neither .pth nor .safetensors")


def _random(name: str, shape: tuple[int, ...], depth: int, seed: int) -> torch.Tensor:
    """One tensor, from a random stream of its own, so that it depends on nothing but its name, shape and the seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    noise = torch.empty(shape).normal_(generator=generator)
    short = name.split(".", 2)[-1] if name.startswith("blocks.") else name
    return _scaled(short, noise, position=_layer(name) / max(depth - 1, 1))


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blocks.") else 0


def _scaled(name: str, noise: torch.Tensor, position: float) -> torch.Tensor:
    """Noise of unit variance -> a tensor of the usual size; `position` is 0 in the first layer and 1 in the last."""
    if name.startswith("att.x_") or name == "ffn.x_k":
        return torch.sigmoid(noise)
    if name == "att.w0":  # from slow to fast forgetting across the channels, as trained models begin
        ramp = torch.linspace(0, 1, noise.shape[-1]) ** (1 + position)
        return -5.5 + 5 * ramp + 0.1 * noise
    if name in OFFSETS:
        return OFFSETS[name] + 0.1 * noise
    if name.endswith((".bias", "att.r_k", "att.a0")):
        return 0.1 * noise
    if name.split(".")[-1] in ("w2", "a2", "v2", "g2"):
        return noise * 0.1
    if name == "emb.weight":
        return noise
    if noise.dim() == 1:
        return 1 + 0.05 * noise
    fan_in = noise.shape[1] if name.endswith(".weight") else noise.shape[0]  # low-rank pairs are stored [in, out]
    return noise.mul_(GAINS.get(name, 0.7) / math.sqrt(fan_in))


OFFSETS = {"att.k_k": 0.8, "att.k_a": 1.0, "att.v0": 0.7}
GAINS = {"ffn.value.weight": 0.3, "head.weight": 2.0}
