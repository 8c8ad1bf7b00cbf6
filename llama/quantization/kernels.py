"""Packed weights: what a parallel layer multiplies with in place of its `weight`.

`pack(weight, scheme)` quantizes a weight and packs it for this device; loading does so tensor by tensor. A new scheme
is a class and a row in SCHEMES:

    int8          8 bits, one scale per row
    int4          4 bits, a scale and a zero for each group of 32 columns; the head (and a tied embedding) as int8
    int8-dynamic  as int8, and each row of activations in 8 bits too (fbgemm): fastest, least accurate

`PrepackedWeight` is not quantized: with compile=True on a CPU the values as they are, in oneDNN's blocked order.
Torch's own kernels do the multiplying; docs/performance.md and docs/quantization.md have the measurements.
"""

import functools
import warnings
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .codecs import CHUNK, TINY, dequantize, quantize_int4, quantize_int8, unpack_nibbles

INT4_ROWS = 64  # weights are padded to a multiple: every layout that torch has for int4 divides it into whole blocks


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


# --------------------------------------------------------------------------------------- not quantized


class PrepackedWeight:
    """A float32 or bfloat16 weight in oneDNN's blocked order; CPU only."""

    MIN_BYTES = 1 << 18  # below, oneDNN's 20 microseconds per call cost more than the order gains

    def __init__(self, weight: Tensor) -> None:
        self.shape, self.nbytes = (weight.shape[0], weight.shape[1]), weight.numel() * weight.itemsize
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._blocked, None, "none", [], "")  # type: ignore[no-any-return]

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        return self._blocked.to_dense()  # type: ignore[no-any-return]

    @staticmethod
    def pays_off(weight: Tensor) -> bool:
        """Whether oneDNN has a blocked order for this weight, and the weight is large enough to gain from it."""
        bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        large = weight.numel() * weight.itemsize >= PrepackedWeight.MIN_BYTES
        usable = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return large and usable and (bfloat16 or weight.dtype == torch.float32)


class RowSlice:
    """Rows start to stop of a packed weight that several layers share; multiplies all its rows, returns these."""

    def __init__(self, whole: PackedWeight, start: int, stop: int) -> None:
        self.whole, self._rows = whole, slice(start, stop)
        self.shape, self.nbytes = (stop - start, whole.shape[1]), whole.nbytes * (stop - start) // whole.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self._rows]

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        return self.whole.dense()[self._rows]


# ------------------------------------------------------------------------------------------- quantized


class Int8Weight:
    """8 bits a weight. Up to MAX_ROWS rows go through the weight-only kernel; for more, blocks are unpacked in the
    cache. Activations are bfloat16, which the kernels are made for.
    """

    quantize = staticmethod(quantize_int8)
    bytes_per_weight = 1.0  # with scales, for long rows
    MAX_ROWS = 8
    STEP = 16  # columns that the kernel reads at once: with other widths it would read beyond the row
    BLOCK = 1024  # rows of the weight that are unpacked at once: 4 MB of bfloat16 at k = 2,048

    def __init__(self, qvalues: Tensor, scales: Tensor) -> None:
        self.shape, self.nbytes = (qvalues.shape[0], qvalues.shape[1]), qvalues.numel() + 2 * scales.numel()
        self._qvalues, self._scales = qvalues, scales.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, self.shape[1]).contiguous()  # (r, k)
        if x.device.type != "cpu":  # compiled, one row is one fused kernel; more are unpacked to memory each time
            y = F.linear(rows, self._qvalues.to(torch.bfloat16)) * self._scales
        elif len(rows) <= self.MAX_ROWS and self.shape[1] % self.STEP == 0:
            y = torch.ops.aten._weight_int8pack_mm(rows, self._qvalues, self._scales)
        else:
            blocks = torch.split(self._qvalues, self.BLOCK)
            y = torch.cat([F.linear(rows, block.to(torch.bfloat16)) for block in blocks], -1).mul_(self._scales)
        return y.view(*x.shape[:-1], self.shape[0]).to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Ids (...) to the weight's rows in float32 (..., k): a tied head is the embedding too."""
        return F.embedding(ids, self._qvalues).float() * F.embedding(ids, self._scales[:, None])

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        return dequantize(self._qvalues, self._scales)


class Int4Weight:
    """4 bits a weight, on a CPU in torch's layout for this processor, on CUDA in that of its tensor-core kernel, or as
    files hold it where the GPU has no such kernel. Up to MAX_ROWS rows go through torch's kernel; for more, blocks are
    unpacked. Activations are bfloat16.
    """

    quantize = staticmethod(quantize_int4)
    bytes_per_weight = 0.625  # in groups of 32: 4 bits, and 2 x 16 for the group
    MAX_ROWS = 64
    BLOCK = 512  # rows of the weight that are unpacked at once
    CUDA_BLOCK = 4096  # the same on CUDA: 0.2 GB at k = 4,096

    def __init__(self, qvalues: Tensor, scales: Tensor) -> None:
        n, k = qvalues.shape[0], 2 * qvalues.shape[1]
        self.shape, self._group = (n, k), k // scales.shape[1]
        pad = -n % INT4_ROWS
        qvalues = F.pad(qvalues, (0, 0, 0, pad))  # (n', k / 2)
        self._scales = F.pad(scales, (0, 0, 0, 0, 0, pad)).transpose(0, 1).contiguous()  # (groups, n', 2)
        if qvalues.device.type == "cpu":
            if not hasattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu"):  # torch 2.5
                raise ValueError(f"int4 on a CPU needs a newer torch than {torch.__version__}: update it, or take int8")
            to_layout, rows = torch.ops.aten._convert_weight_to_int4pack_for_cpu, max(1, CHUNK // k // INT4_ROWS)
            chunks = torch.split(qvalues, rows * INT4_ROWS)  # in chunks, since it takes four bytes for each value
            self._packed = torch.cat([to_layout(unpack_nibbles(chunk).int(), 2) for chunk in chunks])
        else:
            self._tiles = inner_tiles(k, qvalues.device)
            self._packed = qvalues if self._tiles is None else _int4_pack(qvalues, self._tiles)
            self._order = None if self._tiles is None else _tile_order(self._tiles, qvalues.device)
        self.nbytes = qvalues.numel() + self._scales.numel() * 2

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, self.shape[1]).contiguous()  # (r, k)
        if x.device.type != "cpu":
            y = self._on_cuda(rows)
        elif len(rows) <= self.MAX_ROWS:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._packed, self._group, self._scales)
        else:
            y = torch.cat([_in_weight_order(torch.mm(rows, block)) for block in self._blocks()], -1)
        return y[:, : self.shape[0]].reshape(*x.shape[:-1], self.shape[0]).to(x.dtype)

    def _on_cuda(self, rows: Tensor) -> Tensor:
        if len(rows) <= self.MAX_ROWS and self._tiles is not None:
            return torch.ops.aten._weight_int4pack_mm(rows, self._packed, self._group, self._scales)  # type: ignore[no-any-return]
        return torch.cat([F.linear(rows, block) for block in self._cuda_blocks()], -1)

    def _cuda_blocks(self) -> Iterator[Tensor]:
        """The weight unpacked, CUDA_BLOCK rows at a time, bfloat16 (rows, k)."""
        groups, k = len(self._scales), self.shape[1]
        for start in range(0, self._scales.shape[1], self.CUDA_BLOCK):
            stop = min(start + self.CUDA_BLOCK, self._scales.shape[1])
            if self._order is None:
                values = unpack_nibbles(self._packed[start:stop])
            else:
                tiles = _tile_values(self._packed[start // 8 : stop // 8])[..., self._order]  # (n / 8, tiles, values)
                values = tiles.view(*tiles.shape[:2], 8, -1).transpose(1, 2)  # (n / 8, 8, tiles, columns)
            grouped = values.reshape(stop - start, groups, -1).to(torch.bfloat16).sub_(8)
            scale, zero = self._scales[:, start:stop].transpose(0, 1).unsqueeze(-2).unbind(-1)  # (rows, groups, 1)
            yield torch.addcmul(zero, grouped, scale).reshape(-1, k)

    def _blocks(self) -> Iterator[Tensor]:
        """The weight unpacked, BLOCK rows at a time, each block transposed: bfloat16 (k, rows), in torch's order.

        Transposed, torch's loops are over long rows of equal scales: over one block of its layout they take twice as
        long.
        """
        order, k = int4_order(), self.shape[1]
        packed = self._packed.view(-1, k, len(order) // 2)  # (blocks, k, block / 2)
        scales = self._scales.view(k // self._group, -1, len(order), 2)[:, :, order]  # (groups, blocks, block, 2)
        for start in range(0, len(packed), self.BLOCK // len(order)):
            some = slice(start, start + self.BLOCK // len(order))
            nibbles = packed[some].transpose(0, 1)  # (k, blocks, block / 2)
            values = torch.stack([nibbles & 15, nibbles >> 4], 2).view(k, -1).to(torch.bfloat16).sub_(8)  # (k, rows)
            grouped = values.view(len(scales), self._group, -1)  # (groups, group, rows)
            scale, zero = scales[:, some].flatten(1, 2).permute(2, 0, 1).unsqueeze(2).contiguous()  # (groups, 1, rows)
            yield torch.addcmul(zero, grouped, scale).view(k, -1)

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        if self._packed.device.type != "cpu":
            return torch.cat(list(self._cuda_blocks()))[: self.shape[0]].float()
        blocks = [_in_weight_order(block) for block in self._blocks()]
        return torch.cat(blocks, -1).T[: self.shape[0]].float().contiguous()


def _in_weight_order(y: Tensor) -> Tensor:
    """The last axis, rows of a weight in the order of torch's int4 layout, in the weight's own order."""
    order = int4_order()
    return y.view(*y.shape[:-1], -1, len(order))[..., order.argsort()].flatten(-2)


@functools.cache
def int4_order() -> Tensor:
    """Which of a block's rows each nibble of torch's CPU layout holds, low nibbles first: (block,).

    The layout is undocumented and depends on the processor: blocks of 64 rows with AVX-512, of 32 with AVX2. So row
    numbers are packed, four bits at a time; the right block size is the one that gives each of them back once.
    """
    numbers = torch.arange(INT4_ROWS, dtype=torch.int32)[:, None].expand(-1, 32)  # (64, columns)
    to_layout = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    low, high = (to_layout((numbers >> shift & 15).contiguous(), 2) for shift in (0, 4))
    for block in (64, 32, 16):
        packed = torch.stack([low, high]).view(2, -1, 32, block // 2)[:, :, 0].long()  # (2, blocks, block / 2)
        bits = torch.cat([packed & 15, packed >> 4], -1)  # (2, blocks, block)
        order = bits[0] + (bits[1] << 4)
        if order.flatten().sort().values.equal(torch.arange(INT4_ROWS)):
            return order[0]
    raise RuntimeError("torch packs int4 weights in an order that this version of llama does not know: take int8")


def inner_tiles(k: int, device: torch.device) -> int | None:
    """How many tiles of 16 columns torch's CUDA kernel is to read at once, the most that divide k; None where it cannot
    be used: before compute capability 8.0 there is no kernel.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return next((tiles for tiles in (8, 4, 2) if k % (16 * tiles) == 0), None)


def _int4_pack(qvalues: Tensor, tiles: int) -> Tensor:
    """uint8 (n, k / 2), the even column in the low four bits, in the CUDA kernel's layout."""
    swapped = (qvalues & 15) << 4 | qvalues >> 4  # the kernel has the even column in the high ones
    return torch.ops.aten._convert_weight_to_int4pack(swapped, tiles)  # type: ignore[no-any-return]


def _tile_values(packed: Tensor) -> Tensor:
    """int32 (n / 8, k / 16 tiles, 32, tiles / 2) to its values, uint8 (n / 8, k / 16 tiles, 128 tiles) in its order."""
    bytes_ = packed.view(torch.uint8)
    return torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(2)


def _tile_order(tiles: int, device: torch.device) -> Tensor:
    """Where each value of a tile (8 rows, 16 tiles columns) stands in torch's CUDA layout. That is undocumented: we see
    it by packing the values' numbers, four bits at a time.
    """
    numbers = torch.arange(128 * tiles, device=device).view(8, 16 * tiles)
    order = torch.zeros(128 * tiles, dtype=torch.long, device=device)
    for shift in (0, 4, 8):
        digits = (numbers >> shift & 15).to(torch.uint8)
        packed = _int4_pack(digits[:, ::2] | digits[:, 1::2] << 4, tiles)
        order += _tile_values(packed).flatten().long() << shift
    return order.argsort()


class DynamicInt8Weight:
    """fbgemm: 8-bit weights, and activations rounded to 8 bits, each row over its own range; 7 bits without VNNI.

    fbgemm knows one range per call; rows are scaled to 1 first, so that none is rounded to another's range. Scaled row
    by row, NaN also stays NaN, which fbgemm itself would turn into numbers.
    """

    quantize = staticmethod(quantize_int8)
    bytes_per_weight = 1.0

    def __init__(self, qvalues: Tensor, scales: Tensor) -> None:
        if qvalues.device.type != "cpu":
            raise ValueError(f"int8-dynamic is for CPUs, this model is on {qvalues.device.type}: take int8")
        self.shape, self.nbytes = (qvalues.shape[0], qvalues.shape[1]), qvalues.numel() + 8 * scales.numel()
        with warnings.catch_warnings():  # torch announces that the calls will move, not the kernel
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scales), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(qvalues, scales.double(), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self._reduce_range = not torch.cpu._is_vnni_supported()  # without VNNI the 16-bit sums would saturate

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.shape[1])  # (r, k)
        ranges = rows.abs().amax(-1, keepdim=True).float().clamp_(min=TINY)  # (r, 1)
        scaled = (rows / ranges).nan_to_num_()  # NaN comes back with the row's range
        y = torch.ops.quantized.linear_dynamic(scaled, self._packed, self._reduce_range)
        return y.mul_(ranges).view(*x.shape[:-1], self.shape[0]).to(x.dtype)  # type: ignore[no-any-return]

    def dense(self) -> Tensor:
        """As `PackedWeight.dense`."""
        return self._packed.unpack()[0].dequantize()  # type: ignore[no-any-return]


QuantizedWeight: TypeAlias = Int8Weight | Int4Weight | DynamicInt8Weight
SCHEMES: dict[str, type[QuantizedWeight]] = {
    "int8": Int8Weight,
    "int4": Int4Weight,
    "int8-dynamic": DynamicInt8Weight,
}


def weight_scheme(name: str, scheme: str) -> str:
    """The scheme of a weight, by its key: int4 keeps the head in 8 bits, whose errors go straight to the logits."""
    return "int8" if scheme == "int4" and name == "output.weight" else scheme


def head_can_embed(scheme: str) -> bool:
    """Whether the head that this scheme packs can give a tied embedding's rows too: in 8 bits, not fbgemm's."""
    return hasattr(SCHEMES[weight_scheme("output.weight", scheme)], "rows")


def pack(weight: Tensor, scheme: str) -> PackedWeight:
    """`weight` (n, k), quantized and packed; ValueError if the scheme cannot hold it."""
    return SCHEMES[scheme](*SCHEMES[scheme].quantize(weight))


def pack_quantized(qvalues: Tensor, scales: Tensor, scheme: str) -> PackedWeight:
    """As `pack`, from quantized values and scales as files hold them."""
    return SCHEMES[scheme](qvalues, scales)
