"""Numbers and codes: what files hold as well."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

SCHEMES = ("int8", "int4", "int8-dynamic")
GROUPS = (64, 32)
PIECE = 1 << 20  # values that are quantized, or packed, at once
TINY = torch.finfo(torch.bfloat16).tiny  # the least scale: rows of zeros have one too
INT4_ROWS = 64  # torch's int4 layout is made of blocks of this many output rows


# ------------------------------------------------------------------- numbers: what files hold as well


Quantized: TypeAlias = tuple[Tensor, Tensor]  # codes and scales


def _some_rows_at_a_time(quantize: Callable[[Tensor], Quantized]) -> Callable[[Tensor], Quantized]:
    """What is made on the way is several times as large as the weight; this bounds it."""

    @functools.wraps(quantize)
    def in_pieces(weight: Tensor) -> Quantized:
        rows = max(1, PIECE // weight.shape[1])
        codes, scales = (one.new_empty(len(weight), *one.shape[1:]) for one in quantize(weight[:1]))
        for start in range(0, len(weight), rows):
            codes[start : start + rows], scales[start : start + rows] = quantize(weight[start : start + rows])
        return codes, scales

    return in_pieces


@_some_rows_at_a_time
def quantize_int8(weight: Tensor) -> Quantized:
    """Codes int8 (n, k) and scales float32 (n,): weight is about codes * scales[:, None], half a scale off at most.

    ValueError where the weight is not finite. Scales are bfloat16's numbers, since the kernel takes them as such.
    """
    scales = (weight.abs().amax(1).float() / 127).clamp(min=TINY).bfloat16().float()
    _check_finite(scales)
    return (weight.float() / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


@_some_rows_at_a_time
def quantize_int4(weight: Tensor) -> Quantized:
    """Codes uint8 (n, k / 2), the even column in the low four bits, and bfloat16 (n, k / group, 2): scale s, middle m.

    Values are (code - 8) s + m, as in torch's int4 kernels; s and m span each group from its least to its largest.
    ValueError where a row cannot be grouped or the weight is not finite.
    """
    n, k = weight.shape
    group = pick_group(k)
    grouped = weight.float().view(n, k // group, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)  # (n, k / group, 1)
    scale = ((high - low) / 15).clamp(min=TINY).bfloat16()
    middle = (low + scale.float() * 8).bfloat16()
    _check_finite(scale + middle)
    codes = ((grouped - middle.float()) / scale.float()).round_().add_(8).clamp_(0, 15).to(torch.uint8).view(n, k)
    return codes[:, ::2] | codes[:, 1::2] << 4, torch.cat([scale, middle], -1)


def _check_finite(scales: Tensor) -> None:
    if not scales.isfinite().all():  # codes would make a whole row or group of one such value
        raise ValueError("it holds NaN or inf, or is too large: `python -m llama info --check CKPT` lists such weights")


def pick_group(k: int) -> int:
    """Values that share a scale in int4; ValueError where a row of k cannot be grouped."""
    for group in GROUPS:
        if k % group == 0:
            return group
    raise ValueError(f"int4 needs rows of a multiple of {GROUPS[-1]} values, this weight has {k}: take int8")


def nibbles(codes: Tensor) -> Tensor:
    """uint8 (n, k / 2) to uint8 (n, k), values 0 to 15."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 (n, k) from what `quantize_int8` or `quantize_int4` made."""
    if codes.dtype == torch.int8:
        return codes.float() * scales.float()[:, None]
    n, groups, _ = scales.shape
    values = nibbles(codes).float().sub_(8).view(n, groups, -1)
    return (values * scales[..., :1].float()).add_(scales[..., 1:].float()).view(n, -1)
