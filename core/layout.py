"""The official key layout of RWKV-7 (x070): which tensors a model has, their shapes, and what other files look like.

Shapes are written in letters: V vocabulary, C width, F width of the feed-forward, H heads, N head size, and the ranks
of the low-rank pairs w (decay), a (in-context learning rate), v (value residual), g (gate).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rwkv_lightning.core.interfaces import ModelConfig

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

OUTER = {
    "emb.weight": "V C",
    "blocks.0.ln0.weight": "C",
    "blocks.0.ln0.bias": "C",
    "ln_out.weight": "C",
    "ln_out.bias": "C",
    "head.weight": "V C",
}
BLOCK = {
    "att.r_k": "H N",
    "ln1.weight": "C",
    "ln1.bias": "C",
    "ln2.weight": "C",
    "ln2.bias": "C",
    **{f"att.x_{letter}": "C" for letter in "rwkvag"},
    "att.w0": "C",
    "att.w1": "C w",
    "att.w2": "w C",
    "att.a0": "C",
    "att.a1": "C a",
    "att.a2": "a C",
    "att.v0": "C",
    "att.v1": "C v",
    "att.v2": "v C",
    "att.g1": "C g",
    "att.g2": "g C",
    "att.k_k": "C",
    "att.k_a": "C",
    **{f"att.{matrix}.weight": "C C" for matrix in ("receptance", "key", "value", "output")},
    "att.ln_x.weight": "C",
    "att.ln_x.bias": "C",
    "ffn.x_k": "C",
    "ffn.key.weight": "F C",
    "ffn.value.weight": "C F",
}
# The first layer's values are what later layers mix in; files may carry these three there, of any shape, unused.
UNUSED = frozenset(f"blocks.0.att.{name}" for name in ("v0", "v1", "v2"))

TRANSFORMER = ("self_attn", "q_proj", "c_attn", "query_key_value", "attention.wq", "attn_q", "encoder.layer")
QUANTISED = re.compile(r"(^|\.)(W_q|qweight|qzeros|scales|zeros|g_idx|weight_scale|absmax|SCB)$")
MANIFEST = "rwkv_lightning"  # the metadata entry of files this project quantised


class LayoutError(ValueError):
    """The tensors are not those of an RWKV-7 model; the message is a clause that follows the file's name."""


def layer_count(names: Iterable[str]) -> int:
    """One more than the largest block number among the names; 0 when there is none."""
    numbers = (re.match(r"blocks\.(\d+)\.", name) for name in names)
    return max((int(found[1]) + 1 for found in numbers if found), default=0)


def official_names(n_layer: int) -> Iterator[tuple[str, str]]:
    """Every required name with its shape in letters; C, H and N are settled before anything is compared to them."""
    yield from OUTER.items()
    for layer in range(n_layer):
        for name, letters in BLOCK.items():
            full = f"blocks.{layer}.{name}"
            if full not in UNUSED:
                yield full, letters


def official_shapes(n_layer: int, sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Every tensor's shape as official files store it: r_k is [H, N], other vectors of att and ffn are [1, 1, C]."""
    shapes = {}
    for name, letters in official_names(n_layer):
        shape = tuple(sizes[letter] for letter in letters.split())
        mixing = len(shape) == 1 and re.search(r"\.(att|ffn)\.[a-z]+_?[a-z0-9]$", name) is not None
        shapes[name] = (1, 1, *shape) if mixing else shape
    return shapes


def find_config(tensors: Mapping[str, torch.Tensor]) -> ModelConfig:
    """Check every tensor's presence, shape and type. Raises LayoutError naming what is missing or wrong."""
    n_layer = layer_count(tensors)
    sizes: dict[str, int] = {}
    _check_names(tensors, n_layer)
    for name, letters in official_names(n_layer):
        _check_shape(name, tuple(tensors[name].shape), letters.split(), sizes)
        if not tensors[name].is_floating_point() or tensors[name].element_size() < 2:
            raise LayoutError(f"stores {name} as {_type(tensors[name])}: float32, bfloat16 or float16 are read")
    if sizes["H"] * sizes["N"] != sizes["C"]:
        heads = f"{sizes['H']} heads of {sizes['N']}"
        raise LayoutError(f"has {heads} (r_k) but a width of {sizes['C']} (emb.weight): the two do not fit together")
    return ModelConfig(n_layer, sizes["C"], sizes["H"], sizes["N"], sizes["F"], sizes["V"])


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_names(tensors: Mapping[str, torch.Tensor], n_layer: int) -> None:
    required = [name for name, _ in official_names(n_layer)]
    missing = [name for name in required if name not in tensors]
    if missing:
        raise LayoutError(f"lacks {_some(missing)} ({n_layer} layers found): it is incomplete, get the whole file")
    surplus = sorted(set(tensors) - set(required) - UNUSED)
    if surplus:
        raise LayoutError(f"holds tensors that plain RWKV-7 lacks ({_some(surplus)}): variants of it are not supported")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _check_shape(name: str, stored: Shape, letters: list[str], sizes: dict[str, int]) -> None:
    """Compare with what is known, and learn the sizes met for the first time."""
    shape = stored[-1:] if len(letters) == 1 and set(stored[:-1]) <= {1} else stored  # vectors may be [1, 1, C]
    fits = len(shape) == len(letters) and min(shape) > 0
    if not fits or any(sizes.get(letter, size) != size for letter, size in zip(letters, shape, strict=True)):
        expected = ", ".join(f"{letter}={sizes[letter]}" if letter in sizes else letter for letter in letters)
        raise LayoutError(f"has a wrong shape: {name} is {list(stored)}, expected [{expected}]")
    sizes.update(zip(letters, shape, strict=True))


def foreign(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str | None:
    """What this file is when it is not RWKV-7 in the official layout: a clause with the way out, else None."""
    names = list(tensors)
    if MANIFEST in metadata or any(QUANTISED.search(name) for name in names):
        engine = engine_of(metadata) or "gemlite"
        return f"is quantised: choose --inference-engine {engine}, or give the unquantised file it was converted from"
    if any(name.endswith(".att.r_k") for name in names if name.startswith("blocks.")):
        return None
    older = _older_version(tensors)
    if older:
        return f"is an {older} model: this server runs RWKV-7 (x070) only"
    if any(name.endswith(".attn.r_k") for name in names):
        return "is RWKV-7 in the Hugging Face layout: give the official .pth file, whose keys begin with 'blocks.0.'"
    if names and all(name.endswith(".att.time_state") for name in names):
        return "is an initial state, not a model: give the model's own file"
    for name in names:
        if any(mark in name for mark in TRANSFORMER):
            return f"is a transformer (it has the key '{name}'): this server runs RWKV-7 (x070) only"
    first = f"its first key is '{names[0]}'" if names else "it holds no tensors"
    return f"is not an RWKV-7 model ({first}): this server runs RWKV-7 (x070) only"


def engine_of(metadata: Mapping[str, str]) -> str | None:
    """The engine that a converted file's header names, whether or not the rest of it holds; None without one."""
    try:
        engine = json.loads(metadata[MANIFEST])["engine"]
    except (KeyError, ValueError, TypeError):
        return None
    return engine if isinstance(engine, str) else None


def _older_version(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """RWKV-6 mixes with time_maa_*, RWKV-5 has heads (a group norm ln_x, or a decay per head), RWKV-4 has neither."""
    names = list(tensors)
    if any(".att.time_maa_" in name for name in names):
        return "RWKV-6"
    decays = [tensors[name] for name in names if name.endswith(".att.time_decay")]
    if not decays:
        return None
    heads = any(".att.ln_x." in name or name.endswith(".att.time_faaaa") for name in names)
    return "RWKV-5" if heads or decays[0].squeeze().dim() > 1 else "RWKV-4"
