"""An independent Llama in plain torch: no cache, no parallel layers, nothing from the package it is held against.

Works on a dict of Meta's keys in any float type (float64 for tests), and has gradients. Letters: b batch, s tokens,
d dim, h heads, g key/value heads, k head_dim.
"""

import math
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
    k = params.get("head_dim") or d // params["n_heads"]
    q, kv = params["n_heads"] * k, (params.get("n_kv_heads") or params["n_heads"]) * k
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (v, d)}
    for n in range(params["n_layers"]):
        matrices = {f"attention.w{x}": s for x, s in zip("qkvo", ((q, d), (kv, d), (kv, d), (d, q)))}
        matrices |= {f"feed_forward.w{i}": s for i, s in zip((1, 2, 3), ((f, d), (d, f), (f, d)))}
        for name, shape in matrices.items():
            found[f"layers.{n}.{name}.weight"] = shape
            if params.get("attention_bias" if name.startswith("attention") else "mlp_bias"):
                found[f"layers.{n}.{name}.bias"] = shape[:1]
        found |= {f"layers.{n}.{norm}.weight": (d,) for norm in ("attention_norm", "ffn_norm")}
    return {**found, "norm.weight": (d,), "output.weight": (v, d)}


def random_weights(params: Params, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Seeded weights, normal with the usual 1/sqrt(fan in); norms near one."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(params).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        scaled = (
            0.5 * noise
            if name.endswith("bias")
            else 1 + 0.1 * noise
            if len(shape) == 1
            else noise
            if "tok" in name
            else noise / shape[1] ** 0.5
        )
        made[name] = scaled.to(dtype)
    return made


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(k: int, params: Params) -> Tensor:
    """float64 (k/2,), one after another by the letter of facts-family.md section 4."""
    scaling, found = params.get("rope_scaling") or {}, []
    for i in range(k // 2):
        f = params.get("rope_theta", 10000.0) ** (-2 * i / k)
        if scaling.get("rope_type") == "linear":
            f /= scaling["factor"]
        elif scaling.get("rope_type") == "divisors":
            f /= scaling["divisors"][i]
        elif scaling:
            factor, old = scaling["factor"], scaling["original_max_position_embeddings"]
            low, high, wavelength = scaling["low_freq_factor"], scaling["high_freq_factor"], 2 * math.pi / f
            share = min(max((old / wavelength - low) / (high - low), 0), 1)
            f = (1 - share) * f / factor + share * f
        found.append(f)
    return torch.tensor(found, dtype=torch.float64)


def rotate(x: Tensor, theta: float | Tensor) -> Tensor:
    """Neighbouring pairs of x (b, heads, s, k) turned by position times frequency: these (k/2,), or theta's."""
    s, k = x.shape[-2:]
    frequency = theta if isinstance(theta, Tensor) else frequencies(k, {"rope_theta": theta})
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
    x = weights["tok_embeddings.weight"][tokens]  # (b, s, d)
    for n in range(params["n_layers"]):
        layer = {name.removeprefix(f"layers.{n}."): w for name, w in weights.items() if name.startswith(f"layers.{n}.")}

        def linear(y: Tensor, name: str, layer: Weights = layer) -> Tensor:
            return y @ layer[f"{name}.weight"].T + layer.get(f"{name}.bias", torch.zeros((), dtype=y.dtype))

        y = rms_norm(x, layer["attention_norm.weight"], eps)
        q, k, v = (
            linear(y, f"attention.{w}").unflatten(-1, (count, -1)).transpose(1, 2)  # (b, heads, s, k)
            for w, count in (("wq", heads), ("wk", groups), ("wv", groups))
        )
        frequency = frequencies(q.shape[-1], params)
        q, k = rotate(q, frequency), rotate(k, frequency)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        x = x + linear(attention(q, k, v).transpose(1, 2).flatten(2), "attention.wo")
        y = rms_norm(x, layer["ffn_norm.weight"], eps)
        gate = linear(y, "feed_forward.w1")
        x = x + linear(gate * torch.sigmoid(gate) * linear(y, "feed_forward.w3"), "feed_forward.w2")
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
