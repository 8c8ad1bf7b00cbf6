"""Weights in fewer bytes, and in the order that this processor multiplies fastest.

`pack(weight, kind)` makes what a parallel layer multiplies with in place of its `weight`; `load` in checkpoint.py does
so tensor by tensor. Kinds:

    int8          8 bits, one scale a row
    int4          4 bits, a scale and a zero for each group of 64 (32 where the row is no multiple of 64)
    int8-dynamic  as int8, and each call's activations in 8 bits too (fbgemm): fastest, least exact

With compile=True on a CPU weights that are not quantized become `Plain`: every value as it is, in oneDNN's order.
Torch's own kernels do the multiplying; measurements and crossings are in docs/performance.md and docs/quantization.md.
"""

import functools
import warnings
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("int8", "int4", "int8-dynamic")
GROUPS = (64, 32)
INT4_ROWS = 64  # torch's int4 layout is made of blocks of this many output rows


class Packed(Protocol):
    """A weight (n, k) in another form."""

    shape: tuple[int, int]
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., k) to (..., n) in x's dtype."""
        ...

    def dense(self) -> Tensor:
        """The weight that this multiplies with, (n, k)."""
        ...


# ------------------------------------------------------------------- numbers: what files hold as well


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 (n, k) and scales float32 (n,): weight is about codes * scales[:, None], half a scale off at most."""
    scales = (weight.abs().amax(1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.float() / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def quantize_int4(weight: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes uint8 (n, k / 2), the even column in the low four bits, and bfloat16 (n, k / group, 2): scale s, middle m.

    Values are (code - 8) s + m, as in torch's int4 kernels; s and m span each group from its least to its largest.
    """
    n, k = weight.shape
    group = group or pick_group(k)
    grouped = weight.float().view(n, k // group, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)  # (n, k / group, 1)
    scale = ((high - low) / 15).clamp(min=1e-6).bfloat16()
    middle = (low + scale.float() * 8).bfloat16()
    codes = ((grouped - middle.float()) / scale.float()).round_().add_(8).clamp_(0, 15).to(torch.uint8).view(n, k)
    return codes[:, ::2] | codes[:, 1::2] << 4, torch.cat([scale, middle], -1)


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


# ------------------------------------------------------------------------------- what multiplies with them


class Plain:
    """oneDNN's blocked order of a float32 or bfloat16 weight on a CPU."""

    SMALL = 1 << 18  # bytes below which oneDNN's 20 microseconds a call cost more than the order gains

    def __init__(self, weight: Tensor) -> None:
        self.shape, self.nbytes = (weight.shape[0], weight.shape[1]), weight.numel() * weight.itemsize
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._blocked, None, "none", [], "")  # type: ignore[no-any-return]

    def dense(self) -> Tensor:
        return self._blocked.to_dense()  # type: ignore[no-any-return]

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether oneDNN has such an order here, and it pays."""
        known = weight.dtype == torch.float32 or (
            weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        large = weight.numel() * weight.itemsize >= Plain.SMALL
        return known and large and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class Part:
    """Rows start to stop of a packed weight that holds several layers': right for each alone, made for all at once."""

    def __init__(self, whole: Packed, start: int, stop: int) -> None:
        self.whole, self._rows = whole, slice(start, stop)
        self.shape, self.nbytes = (stop - start, whole.shape[1]), whole.nbytes * (stop - start) // whole.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self._rows]

    def dense(self) -> Tensor:
        return self.whole.dense()[self._rows]


class Int8:
    """8 bits a weight. Up to FEW rows the kernel reads the codes; for more, blocks are unpacked in the cache."""

    FEW = 8
    BLOCK = 1024  # rows of the weight; 4 MB of bfloat16 at k = 2,048

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.shape, self.nbytes = (codes.shape[0], codes.shape[1]), codes.numel() + 2 * scales.numel()
        self._codes, self._scales = codes, scales.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, self.shape[1])  # (r, k): the kernels are made for bfloat16
        if x.device.type != "cpu":  # one fused kernel where compiled
            y = F.linear(rows, self._codes.to(torch.bfloat16)) * self._scales
        elif len(rows) <= self.FEW:
            y = torch.ops.aten._weight_int8pack_mm(rows, self._codes, self._scales)
        else:
            blocks = torch.split(self._codes, self.BLOCK)
            y = torch.cat([F.linear(rows, block.to(torch.bfloat16)) for block in blocks], -1).mul_(self._scales)
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    def dense(self) -> Tensor:
        return dequantize(self._codes, self._scales)


class Int4:
    """4 bits a weight, on a CPU in torch's layout for this processor; on CUDA in that of its tensor-core kernel."""

    FEW = 64
    BLOCK = 8  # blocks of 64 rows that are unpacked at once

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        n, k = codes.shape[0], 2 * codes.shape[1]
        self.shape, self._group = (n, k), k // scales.shape[1]
        pad = -n % INT4_ROWS
        values = F.pad(nibbles(codes), (0, 0, 0, pad))  # (n', k)
        self._scales = F.pad(scales, (0, 0, 0, 0, 0, pad)).transpose(0, 1).contiguous()  # (groups, n', 2)
        if codes.device.type == "cpu":
            self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 2)
        else:
            self._codes = torch.ops.aten._convert_weight_to_int4pack(values[:, ::2] << 4 | values[:, 1::2], 8)
        self.nbytes = values.numel() // 2 + self._scales.numel() * 2

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, self.shape[1])  # (r, k)
        if x.device.type != "cpu":
            y = torch.ops.aten._weight_int4pack_mm(rows, self._codes, self._group, self._scales)
        elif len(rows) <= self.FEW:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._codes, self._group, self._scales)
        else:
            y = torch.cat([self._many(rows, first) for first in range(0, self._blocks, self.BLOCK)], -1)
        return y[:, : self.shape[0]].reshape(*x.shape[:-1], -1).to(x.dtype)  # type: ignore[no-any-return]

    @property
    def _blocks(self) -> int:
        return self._scales.shape[1] // INT4_ROWS

    def _unpack(self, first: int) -> Tensor:
        """Blocks of 64 output rows from `first`, transposed: bfloat16 (blocks, k, 64), in the layout's order."""
        codes = self._codes.view(self._blocks, self.shape[1], INT4_ROWS // 2)[first : first + self.BLOCK]
        values = torch.cat([codes & 15, codes >> 4], -1).to(torch.bfloat16).sub_(8)  # (blocks, k, 64)
        scales = self._scales.view(-1, self._blocks, INT4_ROWS, 2)[:, first : first + self.BLOCK]
        scales = scales[:, :, int4_order()].permute(1, 0, 3, 2)  # (blocks, groups, 2, 64)
        grouped = values.view(len(codes), -1, self._group, INT4_ROWS)
        return grouped.mul_(scales[:, :, :1]).add_(scales[:, :, 1:]).view(values.shape)

    def _many(self, rows: Tensor, first: int) -> Tensor:
        products = torch.matmul(rows[None], self._unpack(first))  # (blocks, r, 64)
        return products[:, :, int4_order().argsort()].transpose(0, 1).flatten(1)  # (r, blocks * 64)

    def dense(self) -> Tensor:
        parts = [self._unpack(first) for first in range(0, self._blocks, self.BLOCK)]
        ordered = torch.cat(parts)[:, :, int4_order().argsort()]  # (blocks, k, 64)
        return ordered.transpose(1, 2).reshape(-1, self.shape[1])[: self.shape[0]].float()


@functools.cache
def int4_order() -> Tensor:
    """Which of a block's 64 rows each nibble of torch's CPU layout holds, low nibbles first: (64,).

    The layout follows the processor and is documented nowhere, so row numbers are packed, four bits at a time.
    """
    numbers = torch.arange(INT4_ROWS, dtype=torch.int32)[:, None].expand(-1, 32)
    order = torch.zeros(INT4_ROWS, dtype=torch.long)
    for shift in (0, 4):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((numbers >> shift & 15).contiguous(), 2)
        first = packed.view(32, INT4_ROWS // 2)[0]  # those of one column
        order += torch.cat([first & 15, first >> 4]).long() << shift
    return order


class DynamicInt8:
    """fbgemm: 8-bit weights, and activations rounded to 8 bits over each call's whole range."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.shape, self.nbytes = (codes.shape[0], codes.shape[1]), codes.numel() + 8 * scales.numel()
        with warnings.catch_warnings():  # torch speaks of replacing the way in, not the kernel
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scales), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self._reduce_range = not torch.cpu._is_vnni_supported()  # without VNNI the 16-bit sums would saturate

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x.float(), self._packed, self._reduce_range).to(x.dtype)  # type: ignore[no-any-return]

    def dense(self) -> Tensor:
        return self._packed.unpack()[0].dequantize()  # type: ignore[no-any-return]


def pack(weight: Tensor, kind: str) -> Packed:
    """`weight` (n, k) in the form `kind`; ValueError where it cannot be had."""
    return pack_codes(*(quantize_int4(weight) if kind == "int4" else quantize_int8(weight)), kind)


def pack_codes(codes: Tensor, scales: Tensor, kind: str) -> Packed:
    """As `pack`, from codes and scales as files hold them."""
    if kind == "int8-dynamic":
        if codes.device.type != "cpu":
            raise ValueError(f"int8-dynamic is for CPUs, this model is on {codes.device.type}: take int8")
        return DynamicInt8(codes, scales)
    return Int4(codes, scales) if kind == "int4" else Int8(codes, scales)
