"""An independent Llama in plain torch: no cache, no parallel layers, nothing from the package it is held against.

Works on a dict of Meta's keys in any float type (float64 for tests), and has gradients. Letters: b batch, s tokens,
d dim, h heads, g key/value heads, k head_dim.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Params = Mapping[str, Any]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ffn_width(params: Params) -> int:
    """The published rule: two thirds of 4 dim, times the multiplier, rounded up."""
    width = int(2 * (4 * params["dim"]) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        width = int(params["ffn_dim_multiplier"] * width)
    step: int = params.get("multiple_of", 256)
    return -(-width // step) * step


def shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, in the checkpoint's order."""
    d, v, f = params["dim"], params["vocab_size"], ffn_width(params)
    kv = (params.get("n_kv_heads") or params["n_heads"]) * (d // params["n_heads"])
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (v, d)}
    for n in range(params["n_layers"]):
        found |= {f"layers.{n}.attention.w{x}.weight": s for x, s in zip("qkvo", ((d, d), (kv, d), (kv, d), (d, d)))}
        found |= {f"layers.{n}.feed_forward.w{i}.weight": s for i, s in zip((1, 2, 3), ((f, d), (d, f), (f, d)))}
        found |= {f"layers.{n}.{norm}.weight": (d,) for norm in ("attention_norm", "ffn_norm")}
    return {**found, "norm.weight": (d,), "output.weight": (v, d)}


def random_weights(params: Params, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Seeded weights, normal with the usual 1/sqrt(fan in); norms near one."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(params).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        scaled = 1 + 0.1 * noise if len(shape) == 1 else noise if "tok" in name else noise / shape[1] ** 0.5
        made[name] = scaled.to(dtype)
    return made


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Neighbouring pairs of x (b, heads, s, k) turned by position times frequency."""
    s, k = x.shape[-2:]
    frequency = theta ** (-torch.arange(0, k, 2, dtype=torch.float64) / k)  # (k/2,)
    angle = torch.arange(s, dtype=torch.float64)[:, None] * frequency  # (s, k/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention by hand over (b, h, s, k)."""
    s = q.shape[-2]
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # (b, h, s, s)
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def hidden(weights: Weights, params: Params, tokens: Tensor, attention: Attention = plain_attention) -> Tensor:
    """Ids (b, s) to the states after the final norm (b, s, d)."""
    heads, eps = params["n_heads"], params.get("norm_eps", 1e-5)
    groups = params.get("n_kv_heads") or heads
    theta = params.get("rope_theta", 10000.0)
    x = weights["tok_embeddings.weight"][tokens]  # (b, s, d)
    for n in range(params["n_layers"]):
        layer = {name.split(".")[-2]: w for name, w in weights.items() if name.startswith(f"layers.{n}.")}
        y = rms_norm(x, layer["attention_norm"], eps)
        q, k, v = (
            (y @ layer[w].T).unflatten(-1, (count, -1)).transpose(1, 2)  # (b, heads, s, k)
            for w, count in (("wq", heads), ("wk", groups), ("wv", groups))
        )
        q, k = rotate(q, theta), rotate(k, theta)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        x = x + attention(q, k, v).transpose(1, 2).flatten(2) @ layer["wo"].T
        y = rms_norm(x, layer["ffn_norm"], eps)
        gate = y @ layer["w1"].T
        x = x + (gate * torch.sigmoid(gate) * (y @ layer["w3"].T)) @ layer["w2"].T
    return rms_norm(x, weights["norm.weight"], eps)


def logits(weights: Weights, params: Params, tokens: Tensor, attention: Attention = plain_attention) -> Tensor:
    """Ids (b, s) to logits (b, s, vocabulary)."""
    return hidden(weights, params, tokens, attention) @ weights["output.weight"].T


def greedy(weights: Weights, params: Params, prompt: list[int], n: int, eos_id: int | None = None) -> list[int]:
    """The n likeliest tokens after a prompt, one at a time, each from the whole text before it."""
    out: list[int] = []
    while len(out) < n:
        token = int(logits(weights, params, torch.tensor([prompt + out]))[0, -1].argmax())
        if token == eos_id:
            break
        out.append(token)
    return out
