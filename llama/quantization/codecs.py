"""Numbers to quantized values with their scales, as files hold them, and back."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

GROUP = 32  # columns that share a scale in int4
GROUPS = (GROUP, 64)  # that files may hold: earlier versions wrote groups of 64
CHUNK = 1 << 18  # weights that are quantized, or packed, at once: 1 MB of float32, so that they stay in the cache
TINY = torch.finfo(torch.bfloat16).tiny  # the least scale: rows of zeros have one too

Quantized: TypeAlias = tuple[Tensor, Tensor]  # quantized values and scales


def _in_chunks(quantize: Callable[[Tensor], Quantized]) -> Callable[[Tensor], Quantized]:
    """Quantize some rows at a time: the intermediate tensors are several times as large as the weight."""

    @functools.wraps(quantize)
    def quantize_chunks(weight: Tensor) -> Quantized:
        rows = max(1, CHUNK // weight.shape[1])
        qvalues, scales = (one.new_empty(len(weight), *one.shape[1:]) for one in quantize(weight[:1]))
        for start in range(0, len(weight), rows):
            qvalues[start : start + rows], scales[start : start + rows] = quantize(weight[start : start + rows])
        return qvalues, scales

    return quantize_chunks


@_in_chunks
def quantize_int8(weight: Tensor) -> Quantized:
    """int8 (n, k) and scales float32 (n,): weight is about qvalues * scales[:, None], half a scale off at most.

    ValueError if the weight is not finite. Scales are rounded to bfloat16, as the kernel takes them.
    """
    scales = (weight.abs().amax(1).float() / 127).clamp(min=TINY).bfloat16().float()
    _check_finite(scales)
    return (weight.float() / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


@_in_chunks
def quantize_int4(weight: Tensor) -> Quantized:
    """uint8 (n, k / 2), the even column in the low four bits, and bfloat16 (n, k / group, 2): scale and zero.

    A value is (qvalue - 8) * scale + zero, as in torch's int4 kernels. The 16 steps span each group's range first; then
    scale and zero are fitted to the weights by least squares, and the weights rounded once more (docs/quantization.md).
    ValueError if a row cannot be grouped or the weight is not finite.
    """
    n, k = weight.shape
    if k % GROUP:
        raise ValueError(f"int4 needs rows of a multiple of {GROUP} values, this weight has {k}: take int8")
    grouped = weight.float().reshape(n, k // GROUP, GROUP)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)  # (n, k / GROUP, 1)
    scale = ((high - low) / 15).clamp_(min=TINY)
    steps = _to_steps(grouped, scale, low + scale * 8)
    center, mean = steps.mean(-1, keepdim=True), grouped.mean(-1, keepdim=True)
    deviation = steps.sub_(center)
    slope = (deviation * grouped).sum(-1, keepdim=True) / deviation.square().sum(-1, keepdim=True).clamp_(min=0.5)
    scale = slope.clamp_(min=TINY).bfloat16()
    zero = (mean - scale.float() * center).bfloat16()
    _check_finite(scale + zero)
    qvalues = _to_steps(grouped, scale.float(), zero.float()).add_(8).to(torch.uint8).view(n, k)
    return qvalues[:, ::2] | qvalues[:, 1::2] << 4, torch.cat([scale, zero], -1)


def _to_steps(grouped: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """-8 to 7, the nearest step of each value."""
    return (grouped - zero).div_(scale).round_().clamp_(-8, 7)


def _check_finite(scales: Tensor) -> None:
    if not scales.isfinite().all():  # quantized, a whole row or group would become one such value
        raise ValueError("it holds NaN or inf, or is too large: `python -m llama info --check CKPT` lists such weights")


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 (n, k / 2), the even column in the low four bits, to uint8 (n, k) of 0 to 15."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def dequantize(qvalues: Tensor, scales: Tensor) -> Tensor:
    """Float32 (n, k) from what `quantize_int8` or `quantize_int4` made."""
    if qvalues.dtype == torch.int8:
        return qvalues.float() * scales.float()[:, None]
    n, groups, _ = scales.shape
    values = unpack_nibbles(qvalues).float().sub_(8).view(n, groups, -1)
    return (values * scales[..., :1].float()).add_(scales[..., 1:].float()).view(n, -1)
