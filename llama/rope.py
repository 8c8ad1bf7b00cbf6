"""Rotary frequencies: by what angle each pair of a head turns per position, and how long-context models scale that.

RoFormer (arXiv 2104.09864); position interpolation, "linear" (2306.15595); Llama 3.1's rule (2407.21783, section 3.4).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import LlamaError

# What each kind of scaling is made of, by Hugging Face's names; "divisors" (of GGUF files) is ours.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "divisors": ("divisors",),
}


def check_rope_scaling(scaling: Any, head_dim: int = 0) -> dict[str, Any]:
    """`scaling` with its numbers as floats; LlamaError where it is none of `ROPE_TYPES` or a number cannot be.

    "divisors" are counted against `head_dim`.
    """
    kind = scaling.get("rope_type") if isinstance(scaling, Mapping) else None
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise LlamaError(f"rope_scaling={scaling!r:.120}: its rope_type must be one of {', '.join(ROPE_TYPES)}")
    if set(scaling) != {"rope_type", *ROPE_TYPES[kind]}:
        raise LlamaError(f"rope_scaling={scaling!r:.120}: {kind} takes {', '.join(ROPE_TYPES[kind])} and nothing else")
    if kind == "divisors":
        divisors = scaling["divisors"]
        if not isinstance(divisors, (list, tuple)) or len(divisors) != head_dim // 2 or not all(map(_usable, divisors)):
            found = f"rope_scaling's divisors={divisors!r:.60}"
            raise LlamaError(f"{found} must be {head_dim // 2} numbers above 0, half of head_dim={head_dim}")
        return {"rope_type": kind, "divisors": [float(value) for value in divisors]}
    for name in ROPE_TYPES[kind]:
        if not _usable(scaling[name]):
            raise LlamaError(f"rope_scaling's {name}={scaling[name]!r:.60} must be a number above 0")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        raise LlamaError(f"rope_scaling's low_freq_factor={low!r} must be less than high_freq_factor={high!r}")
    return {"rope_type": kind, **{name: float(scaling[name]) for name in ROPE_TYPES[kind]}}


def llama3_scaling(factor: float) -> dict[str, Any]:
    """Llama 3.1's rule with this factor."""
    values = zip(ROPE_TYPES["llama3"], (factor, 1.0, 4.0, 8192.0), strict=True)
    return {"rope_type": "llama3", **dict(values)}


def named_scaling(params: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of ModelArgs' fields in Hugging Face's terms, where it is "divisors" that say Llama 3.1's rule
    or nothing; as it is else.
    """
    scaling = params.get("rope_scaling")
    if scaling is None or scaling["rope_type"] != "divisors":
        return scaling
    divisors = torch.tensor(scaling["divisors"])
    theta, head_dim = params["rope_theta"], 2 * len(divisors)
    if bool((divisors == 1).all()):
        return None
    rule = llama3_scaling(scaling["divisors"][-1])  # the slowest pair is divided by the factor itself
    wanted = rotary_frequencies(head_dim, theta) / rotary_frequencies(head_dim, theta, rule)
    return rule if torch.allclose(divisors, wanted, rtol=1e-4) else scaling


def _usable(value: Any) -> bool:
    """A number that float32 can hold and divide by."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-30 < value < 1e30


def rotary_frequencies(head_dim: int, theta: float = 10000.0, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """The angle per position of each pair, float32 (head_dim / 2,), every step in float32 as in the reference."""
    freqs: Tensor = 1.0 / (theta ** (torch.arange(0, head_dim, 2)[: head_dim // 2].float() / head_dim))
    if scaling is None:
        return freqs
    scaling = check_rope_scaling(scaling, head_dim)
    if scaling["rope_type"] == "divisors":
        return freqs / torch.tensor(scaling["divisors"], dtype=torch.float32, device=freqs.device)
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return torch.div(freqs, factor)
    low, high, old = (scaling[name] for name in ROPE_TYPES["llama3"][1:])
    wavelengths = 2 * math.pi / freqs
    smooth = (old / wavelengths - low) / (high - low)  # 0 where the wavelength is long, 1 where it is short
    between = (1 - smooth) * freqs / factor + smooth * freqs
    scaled = torch.where(wavelengths > old / low, freqs / factor, between)
    return torch.where(wavelengths < old / high, freqs, scaled)


def rotary_table(freqs: Tensor, end: int) -> Tensor:
    """e^(i m f) for positions m < end and frequencies f (k/2,): complex64 (end, k/2)."""
    positions = torch.arange(end, device=freqs.device)
    angles = torch.outer(positions, freqs).float()  # float32, as published: float64 moves late logits by 1e-3
    return torch.polar(torch.ones_like(angles), angles)  # (end, k/2)
