"""Weights in fewer bytes, and in the order that this processor multiplies fastest.

`pack(weight, kind)` makes what a parallel layer multiplies with in place of its `weight`; `load` in checkpoint.py does
so tensor by tensor. Kinds:

    int8          8 bits, one scale a row
    int4          4 bits, a scale and a zero for each group of 64 (32 where the row is no multiple of 64)
    int8-dynamic  as int8, and each row of activations in 8 bits too (fbgemm): fastest, least exact

With compile=True on a CPU weights that are not quantized become `Plain`: every value as it is, in oneDNN's order.
Torch's own kernels do the multiplying; measurements and crossings are in docs/performance.md and docs/quantization.md.
"""

import functools
import warnings
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .codecs import INT4_ROWS, PIECE, TINY, dequantize, nibbles, quantize_int4, quantize_int8


class PackedWeight(Protocol):
    """A weight (n, k) in another form."""

    shape: tuple[int, int]
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., k) to (..., n) in x's dtype."""
        ...

    def dense(self) -> Tensor:
        """The weight that this multiplies with, (n, k)."""
        ...


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
        """As `PackedWeight.dense`."""
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

    def __init__(self, whole: PackedWeight, start: int, stop: int) -> None:
        self.whole, self._rows = whole, slice(start, stop)
        self.shape, self.nbytes = (stop - start, whole.shape[1]), whole.nbytes * (stop - start) // whole.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self._rows]

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        return self.whole.dense()[self._rows]


class Int8:
    """8 bits a weight. Up to FEW rows the kernel reads the codes; for more, blocks are unpacked in the cache."""

    FEW = 8
    STEP = 16  # columns the kernel reads at once: with other widths it would read beyond the row
    BLOCK = 1024  # rows of the weight; 4 MB of bfloat16 at k = 2,048

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.shape, self.nbytes = (codes.shape[0], codes.shape[1]), codes.numel() + 2 * scales.numel()
        self._codes, self._scales = codes, scales.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, self.shape[1]).contiguous()  # (r, k): the kernels are made for bfloat16
        if x.device.type != "cpu":  # one fused kernel where compiled
            y = F.linear(rows, self._codes.to(torch.bfloat16)) * self._scales
        elif len(rows) <= self.FEW and self.shape[1] % self.STEP == 0:
            y = torch.ops.aten._weight_int8pack_mm(rows, self._codes, self._scales)
        else:
            blocks = torch.split(self._codes, self.BLOCK)
            y = torch.cat([F.linear(rows, block.to(torch.bfloat16)) for block in blocks], -1).mul_(self._scales)
        return y.view(*x.shape[:-1], self.shape[0]).to(x.dtype)

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        return dequantize(self._codes, self._scales)


class Int4:
    """4 bits a weight, on a CPU in torch's layout for this processor; on CUDA in that of its tensor-core kernel."""

    FEW = 64
    ROWS = 512  # rows of the weight that are unpacked at once

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        n, k = codes.shape[0], 2 * codes.shape[1]
        self.shape, self._group = (n, k), k // scales.shape[1]
        pad = -n % INT4_ROWS
        codes = F.pad(codes, (0, 0, 0, pad))  # (n', k / 2)
        self._scales = F.pad(scales, (0, 0, 0, 0, 0, pad)).transpose(0, 1).contiguous()  # (groups, n', 2)
        if codes.device.type == "cpu":
            pack_some, rows = torch.ops.aten._convert_weight_to_int4pack_for_cpu, max(1, PIECE // k // INT4_ROWS)
            pieces = torch.split(codes, rows * INT4_ROWS)  # one after another, as it wants four bytes for each value
            self._codes = torch.cat([pack_some(nibbles(piece).int(), 2) for piece in pieces])
        else:
            self._codes = torch.ops.aten._convert_weight_to_int4pack((codes & 15) << 4 | codes >> 4, 8)
        self.nbytes = codes.numel() + self._scales.numel() * 2

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, self.shape[1]).contiguous()  # (r, k)
        if x.device.type != "cpu":
            y = torch.ops.aten._weight_int4pack_mm(rows, self._codes, self._group, self._scales)
        elif len(rows) <= self.FEW:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._codes, self._group, self._scales)
        else:
            y = torch.cat([self._many(rows, first) for first in range(0, self._scales.shape[1], self.ROWS)], -1)
        return y[:, : self.shape[0]].reshape(*x.shape[:-1], self.shape[0]).to(x.dtype)  # type: ignore[no-any-return]

    def _unpack(self, first: int) -> Tensor:
        """ROWS output rows from `first`, transposed: bfloat16 (k, rows), in the layout's order.

        Long rows of equal scales first: torch's loops over one block would take twice the time.
        """
        block, k = len(int4_order()), self.shape[1]
        these = slice(first // block, (first + self.ROWS) // block)
        codes = self._codes.view(-1, k, block // 2)[these].transpose(0, 1)  # (k, blocks, block / 2)
        values = torch.stack([codes & 15, codes >> 4], 2).view(k, -1).to(torch.bfloat16).sub_(8)  # (k, rows)
        grouped = values.view(-1, self._group, values.shape[1])  # (groups, group, rows)
        scales = self._scales.view(len(grouped), -1, block, 2)[:, these, int4_order()]  # (groups, blocks, block, 2)
        scale, middle = scales.flatten(1, 2).permute(2, 0, 1).unsqueeze(2).contiguous()  # (groups, 1, rows) each
        return torch.addcmul(middle, grouped, scale).view(values.shape)

    def _ordered(self, y: Tensor) -> Tensor:
        """The last axis, rows in the layout's order, in that of the weight."""
        return y.view(*y.shape[:-1], -1, len(int4_order()))[..., int4_order().argsort()].flatten(-2)

    def _many(self, rows: Tensor, first: int) -> Tensor:
        return self._ordered(torch.mm(rows, self._unpack(first)))  # (r, rows)

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        parts = [self._ordered(self._unpack(first)) for first in range(0, self._scales.shape[1], self.ROWS)]
        return torch.cat(parts, -1).T[: self.shape[0]].float().contiguous()


@functools.cache
def int4_order() -> Tensor:
    """Which of a block's rows each nibble of torch's CPU layout holds, low nibbles first: (block,).

    The layout is documented nowhere and follows the processor: blocks of 64 rows with AVX-512, of 32 with AVX2. So
    row numbers are packed, four bits at a time; the block size is the one with which each of them comes back once.
    """
    numbers = torch.arange(INT4_ROWS, dtype=torch.int32)[:, None].expand(-1, 32)  # (64, columns)
    halves = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu((numbers >> shift & 15).contiguous(), 2) for shift in (0, 4)
    ]
    for block in (64, 32, 16):
        low, high = (nibbles_of_column(half.view(-1, 32, block // 2)[:, 0]) for half in halves)  # (64 / block, block)
        order = low + 16 * high
        if order.flatten().sort().values.equal(torch.arange(INT4_ROWS)):
            return order[0]
    raise RuntimeError("torch packs int4 weights in an order that this version of llama does not know: take int8")


def nibbles_of_column(packed: Tensor) -> Tensor:
    """One column of packed blocks (blocks, block / 2) as numbers (blocks, block), low nibbles first."""
    return torch.cat([packed & 15, packed >> 4], -1).long()


class DynamicInt8:
    """fbgemm: 8-bit weights, and activations rounded to 8 bits, each row over its own range.

    fbgemm knows one range a call; rows are brought to 1 before, so that none is rounded to another's range. Row by row
    it also says NaN where a row has one, which fbgemm itself would pass over.
    """

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.shape, self.nbytes = (codes.shape[0], codes.shape[1]), codes.numel() + 8 * scales.numel()
        with warnings.catch_warnings():  # torch speaks of replacing the way in, not the kernel
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scales), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self._reduce_range = not torch.cpu._is_vnni_supported()  # without VNNI the 16-bit sums would saturate

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.shape[1])  # (r, k)
        sizes = rows.abs().amax(-1, keepdim=True).float().clamp_(min=TINY)  # (r, 1)
        scaled = (rows / sizes).nan_to_num_()  # a NaN comes back with its row's size
        y = torch.ops.quantized.linear_dynamic(scaled, self._packed, self._reduce_range)
        return y.mul_(sizes).view(*x.shape[:-1], self.shape[0]).to(x.dtype)  # type: ignore[no-any-return]

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        return self._packed.unpack()[0].dequantize()  # type: ignore[no-any-return]


def pack(weight: Tensor, kind: str) -> PackedWeight:
    """`weight` (n, k) in the form `kind`; ValueError where it cannot be had."""
    return pack_codes(*(quantize_int4(weight) if kind == "int4" else quantize_int8(weight)), kind)


def pack_codes(codes: Tensor, scales: Tensor, kind: str) -> PackedWeight:
    """As `pack`, from codes and scales as files hold them."""
    if kind == "int8-dynamic":
        if codes.device.type != "cpu":
            raise ValueError(f"int8-dynamic is for CPUs, this model is on {codes.device.type}: take int8")
        return DynamicInt8(codes, scales)
    return Int4(codes, scales) if kind == "int4" else Int8(codes, scales)
