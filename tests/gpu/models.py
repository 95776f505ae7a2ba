"""Random models of real shapes, made on the device: billions of weights in a second, and no file to read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from rwkv_lightning.core import random_checkpoint
from rwkv_lightning.core.interfaces import Linear, ModelConfig
from rwkv_lightning.core.random_checkpoint import SHAPES, ModelShape
from rwkv_lightning.core.rwkv7 import RWKV7
from rwkv_lightning.kernels.linear import make_linear
from rwkv_lightning.kernels.triton.graphs import capture_for


class RandomSource:
    """An `interfaces.WeightSource` whose tensors are drawn when they are asked for."""

    def __init__(self, shape: ModelShape, device: str, dtype: torch.dtype) -> None:
        heads = shape.n_embd // shape.head_size
        sizes = shape.head_size, shape.n_ffn or 4 * shape.n_embd, shape.vocab_size
        self.config = ModelConfig(shape.n_layer, shape.n_embd, heads, *sizes)
        self._shapes = shape.tensors()
        self._device = torch.device(device)
        self._dtype = dtype
        self._embedding = self.draw("emb.weight").to(dtype)

    def draw(self, name: str) -> torch.Tensor:
        """A float32 tensor of the sizes that trained models have."""
        within = name.split(".", 2)[-1] if name.startswith("blocks.") else name
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else 0
        with self._device:
            noise = torch.randn(self._shapes[name])
            return random_checkpoint._scaled(within, noise, layer / max(self.config.n_layer - 1, 1))

    def linear(self, name: str) -> Linear:
        weight = self.draw(name).to(self._dtype)
        small = not name.endswith(".weight")
        return make_linear(weight.t() if small else weight, self._dtype, sparse_input=name.endswith("ffn.value.weight"))

    def table(self) -> tuple[torch.Tensor, None]:
        return self._embedding, None

    def tensor(self, name: str) -> torch.Tensor:
        return self.draw(name).reshape(-1)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by name, as a file holds them."""
        for name in self._shapes:
            yield name, self.draw(name).to(self._dtype).cpu()


def random_model(shape: str, device: str, dtype: torch.dtype, *, graphs: bool = True) -> RWKV7:
    """A model of a named shape, with float16 states; `graphs` False for the eager loop."""
    return RWKV7(
        RandomSource(SHAPES[shape], device, dtype),
        device=device,
        dtype=dtype,
        state_dtype=torch.float16,
        description=f"random {shape}",
        capture=capture_for(device) if graphs else None,
    )


def random_file(shape: str, path: Path, device: str, dtype: torch.dtype) -> Path:
    """A checkpoint of a named shape in safetensors."""
    save_file(dict(RandomSource(SHAPES[shape], device, dtype).tensors()), path)
    return path


def step_cost(shape: str, tokens: int, rows: int) -> tuple[float, float]:
    """What a step of `rows` rows and `tokens` tokens cannot do without: (bytes read and written, operations).

    Weights once in 16 bits, states in and out in 16 bits, logits out and in; two operations per weight and token, the
    head only once per row.
    """
    form = SHAPES[shape]
    head = math.prod(form.tensors()["head.weight"])
    weights = form.parameters() - math.prod(form.tensors()["emb.weight"])
    state = form.n_layer * form.n_embd * form.head_size
    nbytes = 2 * weights + 4 * state * rows + 8 * form.vocab_size * rows
    return float(nbytes), float(2 * (weights - head) * tokens + 2 * head * rows)
