"""The obvious batched PyTorch RWKV-7: one token for all rows at a time, bf16 weights, no kernels of our own.

A yardstick, written the way a first implementation usually is; states in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

HEAD = 64


class NaiveRwkv7:
    """Args: weights: an official checkpoint's tensors."""

    def __init__(self, weights: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.w = {name: tensor.to(dtype).squeeze() for name, tensor in weights.items()}
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        width = self.w["emb.weight"].shape[1]
        self.heads = width // HEAD
        self.shift = torch.zeros(self.layers, 2, rows, width, dtype=dtype)
        self.state = torch.zeros(self.layers, rows, self.heads, HEAD, HEAD)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows] token ids -> [rows, V] logits; the states advance."""
        w = self.w
        x = self.norm(w["emb.weight"][tokens], "blocks.0.ln0")
        first = None
        for layer in range(self.layers):
            h = self.norm(x, f"blocks.{layer}.ln1")
            y, first = self.time_mix(h, layer, first)
            x = x + y
            h = self.norm(x, f"blocks.{layer}.ln2")
            x = x + self.channel_mix(h, layer)
        return F.linear(self.norm(x, "ln_out"), w["head.weight"]).float()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.w[f"{name}.weight"]
        return F.layer_norm(x, weight.shape, weight, self.w[f"{name}.bias"])

    def channel_mix(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        previous, self.shift[layer, 1] = self.shift[layer, 1].clone(), h
        k = h + (previous - h) * self.w[f"blocks.{layer}.ffn.x_k"]
        k = torch.relu(F.linear(k, self.w[f"blocks.{layer}.ffn.key.weight"])) ** 2
        return F.linear(k, self.w[f"blocks.{layer}.ffn.value.weight"])

    def time_mix(self, h: torch.Tensor, layer: int, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        p = {n.split(".att.")[1]: t for n, t in self.w.items() if n.startswith(f"blocks.{layer}.att.")}
        previous, self.shift[layer, 0] = self.shift[layer, 0].clone(), h
        xr, xw, xk, xv, xa, xg = (h + (previous - h) * p[f"x_{name}"] for name in "rwkvag")
        r, k, v = (F.linear(x, p[f"{n}.weight"]) for x, n in ((xr, "receptance"), (xk, "key"), (xv, "value")))
        w = p["w0"] + torch.tanh(xw @ p["w1"]) @ p["w2"]
        decay = torch.exp(-torch.exp(-F.softplus(-w.float()) - 0.5))
        a = torch.sigmoid(p["a0"] + xa @ p["a1"] @ p["a2"])
        g = torch.sigmoid(xg @ p["g1"]) @ p["g2"]
        if first is None:
            first = v
        else:
            v = v + (first - v) * torch.sigmoid(p["v0"] + xv @ p["v1"] @ p["v2"])
        rows = h.shape[0]
        kk = F.normalize((k * p["k_k"]).view(rows, self.heads, HEAD).float(), dim=-1)
        k = k * (1 + (a - 1) * p["k_a"])
        r, k, v, a, decay = (t.view(rows, self.heads, HEAD).float() for t in (r, k, v, a, decay))
        s = self.state[layer]
        sa = s @ -kk[..., None]
        s = s * decay[:, :, None, :] + sa * (kk * a)[:, :, None, :] + v[..., None] * k[:, :, None, :]
        self.state[layer] = s
        y = (s @ r[..., None])[..., 0].reshape(rows, -1)
        y = F.group_norm(y, self.heads, p["ln_x.weight"].float(), p["ln_x.bias"].float(), 64e-5)
        bonus = ((r * k * p["r_k"].view(self.heads, HEAD)).sum(-1, keepdim=True) * v).reshape(rows, -1)
        return F.linear((y + bonus).to(g.dtype) * g, p["output.weight"]), first
