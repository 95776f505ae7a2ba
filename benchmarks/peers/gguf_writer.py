"""Write an RWKV-7 checkpoint as GGUF for llama.cpp: in float32, bfloat16 or Q8_0.

The tensors' names are those of the `gguf` package. Matrices take the wanted type; vectors, the six time mixes and the
decay's low-rank pair stay float32, the other low-rank pairs bfloat16 at most, as llama.cpp's own tools leave them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rwkv_lightning.core.layout import find_config

KINDS = ("f32", "bf16", "q8_0")
CONTEXT = 1 << 20  # the architecture has no limit; llama.cpp wants a number
EPSILON = 1e-5
MIXES = "rwkvag"  # the order within the fused tensor
OUTER = {
    "emb.weight": ("TOKEN_EMBD", "weight"),
    "blocks.0.ln0.weight": ("TOKEN_EMBD_NORM", "weight"),
    "blocks.0.ln0.bias": ("TOKEN_EMBD_NORM", "bias"),
    "ln_out.weight": ("OUTPUT_NORM", "weight"),
    "ln_out.bias": ("OUTPUT_NORM", "bias"),
    "head.weight": ("OUTPUT", "weight"),
}
LOW_RANK = tuple(f"{letter}{number}" for letter in "wavg" for number in (1, 2))
BLOCK = {
    **{
        f"{ln}.{part}": (name, part)
        for ln, name in (("ln1", "ATTN_NORM"), ("ln2", "ATTN_NORM_2"))
        for part in ("weight", "bias")
    },
    **{
        f"att.{name}": (f"TIME_MIX_{name.upper()}", "weight")
        for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k", *LOW_RANK)
    },
    **{
        f"att.{name}.weight": (f"TIME_MIX_{name.upper()}", "weight")
        for name in ("receptance", "key", "value", "output")
    },
    "att.ln_x.weight": ("TIME_MIX_LN", "weight"),
    "att.ln_x.bias": ("TIME_MIX_LN", "bias"),
    "ffn.x_k": ("CHANNEL_MIX_LERP_K", "weight"),
    "ffn.key.weight": ("CHANNEL_MIX_KEY", "weight"),
    "ffn.value.weight": ("CHANNEL_MIX_VALUE", "weight"),
}
FLOAT32_MATRICES = ("TIME_MIX_W1", "TIME_MIX_W2", "TIME_MIX_LERP_FUSED")


def write(weights: Mapping[str, torch.Tensor], path: Path, kind: str, tokens: Sequence[bytes]) -> Path:
    """Write official tensors as GGUF.

    Args:
        kind: one of KINDS.
        tokens: the bytes of each token id; short lists are filled up to the model's vocabulary.
    """
    import gguf

    part = path.with_suffix(".part")
    writer: Any = gguf.GGUFWriter(part, "rwkv7")
    _write_facts(writer, weights, kind)
    _write_vocabulary(writer, tokens, weights["emb.weight"].shape[0])
    for label, suffix, layer, tensor in entries(weights):
        name = gguf.TENSOR_NAMES[getattr(gguf.MODEL_TENSOR, label)].format(bid=layer)
        data, form = encoded(label, tensor, kind)
        writer.add_tensor(f"{name}.{suffix}", data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)
    return path


def entries(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, int, torch.Tensor]]:
    """(name of the `gguf` constant, suffix, layer, float32 tensor) of everything that the file holds."""
    for name, (label, suffix) in OUTER.items():
        yield label, suffix, 0, weights[name].float().squeeze()
    for layer in range(find_config(weights).n_layer):
        names = {short: f"blocks.{layer}.{short}" for short in BLOCK}
        for letter in "012":  # the first layer has no value mix; llama.cpp wants the tensors, and never reads them
            if layer == 0:
                names[f"att.v{letter}"] = f"blocks.0.att.a{letter}"
        for short, (label, suffix) in BLOCK.items():
            yield label, suffix, layer, _oriented(short, weights[names[short]].float().squeeze())
        mixes = [weights[f"blocks.{layer}.att.x_{letter}"].float().reshape(1, 1, -1) for letter in MIXES]
        yield "TIME_MIX_LERP_FUSED", "weight", layer, torch.stack(mixes)


def _oriented(short: str, tensor: torch.Tensor) -> torch.Tensor:
    """Low-rank pairs are stored [in, out] in the official layout, and [out, in] as every matrix in GGUF."""
    if short.removeprefix("att.") in LOW_RANK:
        return tensor.T.contiguous()
    return tensor.flatten() if short == "att.r_k" else tensor


def encoded(label: str, tensor: torch.Tensor, kind: str) -> tuple[np.ndarray[Any, Any], Any]:
    """The tensor's numbers as the file holds them, and their GGUF type."""
    import gguf

    types = gguf.GGMLQuantizationType
    wanted = {"f32": types.F32, "bf16": types.BF16, "q8_0": types.Q8_0}[kind]
    low_rank = label.removeprefix("TIME_MIX_").lower() in LOW_RANK
    if tensor.dim() == 1 or label in FLOAT32_MATRICES:
        wanted = types.F32
    elif low_rank and kind != "f32":
        wanted = types.BF16
    return gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), wanted), wanted


def _write_facts(writer: Any, weights: Mapping[str, torch.Tensor], kind: str) -> None:
    import gguf

    config = find_config(weights)
    last = config.n_layer - 1
    ranks = {letter: weights[f"blocks.{last}.att.{letter}1"].shape[-1] for letter in "wavg"}
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_ffn)
    writer.add_head_count(0)  # wanted, and unused
    writer.add_layer_norm_eps(EPSILON)
    writer.add_wkv_head_size(config.head_size)
    writer.add_token_shift_count(2)
    writer.add_decay_lora_rank(ranks["w"])
    writer.add_iclr_lora_rank(ranks["a"])
    writer.add_value_residual_mix_lora_rank(ranks["v"])
    writer.add_gate_lora_rank(ranks["g"])
    types = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(getattr(gguf.LlamaFileType, types[kind]))


def _write_vocabulary(writer: Any, tokens: Sequence[bytes], size: int) -> None:
    """llama.cpp's own form of the World vocabulary: every byte that is not plain text is escaped."""
    import gguf

    kinds = gguf.TokenType
    texts = [b"<s>", *(repr(token)[2:-1].encode() for token in tokens[1:size])]
    types = [kinds.CONTROL, *(kinds.NORMAL if token else kinds.UNUSED for token in tokens[1:size])]
    texts = [text or f"[PAD{number}]".encode() for number, text in enumerate(texts)]
    texts += [f"[PAD{number}]".encode() for number in range(len(texts), size)]
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(texts)
    writer.add_token_types([*types, *[kinds.UNUSED] * (size - len(types))])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
