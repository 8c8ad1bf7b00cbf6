"""ggml's blocks: how llama.cpp's files hold quantized values. One class for each type, unpacked some rows at a time.

A block is 32 or 256 consecutive values of a row. `d`, `m` and `dmin` are float16; of a byte that holds two values the
low four bits come first. Layouts: ggml's ggml-common.h and ggml-quants.c; checked against the package `gguf`.
"""

import torch
from torch import Tensor

from .codecs import Codec, Int4Groups

PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml's types that are torch's own
FOREIGN_TYPES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


class Blocks(Codec):
    """A tensor (..., k) as bytes (..., k / values * size)."""

    values: int  # of a block
    size: int  # its bytes

    def __init__(self, stored: Tensor) -> None:
        self.blocks = stored

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """As `Codec.stored`."""
        return (self.blocks,)

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Codec.shape`."""
        return (*self.blocks.shape[:-1], self.blocks.shape[-1] // self.size * self.values)

    def rows(self, start: int, stop: int) -> Tensor:
        """As `Codec.rows`."""
        if self.blocks.ndim == 1:
            return self.unpack(self.blocks.view(-1, self.size)).flatten()[start:stop]
        some = self.blocks[start:stop]
        unpacked = self.unpack(some.reshape(-1, self.size))  # (blocks, values)
        return unpacked.reshape(len(some), *self.shape[1:])

    def dequantize(self) -> Tensor:
        """As `Codec.dequantize`."""
        return self.rows(0, self.shape[0])

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """uint8 (blocks, size) to float32 (blocks, values)."""
        raise NotImplementedError


def _float16(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Numbers of float16 from a byte on, as float32 (blocks, count)."""
    return blocks[:, start : start + 2 * count].view(torch.float16).float()


def _nibbles(bytes_: Tensor) -> Tensor:
    """uint8 (..., n) to (..., 2 n): all low four bits, then all high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Bit j of four bytes as 16 or 0, for value j (blocks, 32)."""
    bits = blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8, device="cpu")  # (blocks, 4, 8)
    return ((bits & 1) << 4).flatten(1)


class Q8_0(Blocks):
    """d, 32 int8: d q."""

    name, values, size = "Q8_0", 32, 34

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """As `Blocks.unpack`: d q, d of the block's own."""
        return blocks[:, 2:].view(torch.int8).float().mul_(_float16(blocks, 0))


class _Nibbles(Blocks):
    """Four bits a value: (q - 8) scale + zero, as int4 holds it too."""

    @staticmethod
    def scale_and_zero(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 (blocks, 1) each."""
        raise NotImplementedError

    def for_scheme(self, scheme: str) -> Codec | None:
        """int4 with the same codes; None where bfloat16 for scale and zero would move a value by a quarter step."""
        rows, columns = self.shape
        if scheme != "int4":
            return None
        qvalues = torch.empty(rows, columns // 2, dtype=torch.uint8, device="cpu")
        scales = torch.empty(rows, columns // self.values, 2, dtype=torch.bfloat16, device="cpu")
        for start in range(0, rows, step := max(1, (1 << 18) // columns)):
            blocks = self.blocks[start : start + step].reshape(-1, self.size)
            scale, zero = self.scale_and_zero(blocks)
            rounded_scale, rounded_zero = scale.bfloat16(), zero.bfloat16()
            error = (rounded_scale.float() - scale).abs() * 8 + (rounded_zero.float() - zero).abs()
            if not (error <= scale.abs() / 4).logical_or(scale == 0).all():  # NaN is not kept either
                return None
            codes = _nibbles(blocks[:, -16:])  # (blocks, 32)
            qvalues[start : start + step] = (codes[:, ::2] | codes[:, 1::2] << 4).view(-1, columns // 2)
            scales[start : start + step] = torch.cat([rounded_scale, rounded_zero], -1).view(-1, scales.shape[1], 2)
        return Int4Groups(qvalues, scales)


class Q4_0(_Nibbles):
    """d, 16 bytes: d (q - 8)."""

    name, values, size = "Q4_0", 32, 18

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """As `Blocks.unpack`: d (q - 8), d of the block's own."""
        return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_float16(blocks, 0))

    @staticmethod
    def scale_and_zero(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """As `_Nibbles.scale_and_zero`."""
        scale = _float16(blocks, 0)
        return scale, torch.zeros_like(scale)


class Q4_1(_Nibbles):
    """d, m, 16 bytes: d q + m."""

    name, values, size = "Q4_1", 32, 20

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """As `Blocks.unpack`: d q + m, d of the block's own."""
        return _nibbles(blocks[:, 4:]).float().mul_(_float16(blocks, 0)).add_(_float16(blocks, 2))

    @staticmethod
    def scale_and_zero(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """As `_Nibbles.scale_and_zero`."""
        scale = _float16(blocks, 0)
        return scale, _float16(blocks, 2) + 8 * scale


class Q5_0(Blocks):
    """d, four bytes of fifth bits, 16 bytes: d (q - 16)."""

    name, values, size = "Q5_0", 32, 22

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """As `Blocks.unpack`: d (q - 16), d of the block's own."""
        codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
        return codes.float().sub_(16).mul_(_float16(blocks, 0))


class Q5_1(Blocks):
    """d, m, four bytes of fifth bits, 16 bytes: d q + m."""

    name, values, size = "Q5_1", 32, 24

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """As `Blocks.unpack`: d q + m, d of the block's own."""
        codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
        return codes.float().mul_(_float16(blocks, 0)).add_(_float16(blocks, 2))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """d times scale and dmin times minimum of eight sub-blocks, (blocks, 8, 1); 12 bytes hold six bits of each."""
    low, middle, high = torch.split(blocks[:, 4:16], 4, 1)  # (blocks, 4) each
    scales = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], 1)  # (blocks, 8)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6) << 4], 1)
    return (scales * _float16(blocks, 0))[..., None], (minima * _float16(blocks, 2))[..., None]


def _k_nibbles(bytes_: Tensor) -> Tensor:
    """Sub-blocks of 32 values (blocks, 8, 32): of each 32 bytes the low four bits, then the high ones."""
    return _nibbles(bytes_.reshape(-1, 4, 32)).view(-1, 8, 32)


class Q4_K(Blocks):
    """d, dmin, eight scales and minima, 128 bytes: d scale q - dmin minimum."""

    name, values, size = "Q4_K", 256, 144

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """As `Blocks.unpack`: d scale q - dmin minimum."""
        scales, minima = _k_scales(blocks)
        return _k_nibbles(blocks[:, 16:]).float().mul_(scales).sub_(minima).flatten(1)


class Q5_K(Blocks):
    """As Q4_K, with 32 bytes of fifth bits before the 128: bit j of byte i belongs to value i of sub-block j."""

    name, values, size = "Q5_K", 256, 176

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """As `Blocks.unpack`: as Q4_K, of five bits."""
        scales, minima = _k_scales(blocks)
        bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8, device="cpu")[:, None]  # (blocks, 8, 32)
        codes = _k_nibbles(blocks[:, 48:]) | (bits & 1) << 4
        return codes.float().mul_(scales).sub_(minima).flatten(1)


class Q6_K(Blocks):
    """128 bytes of low four bits, 64 of high two, 16 int8 scales, d: d scale (q - 32)."""

    name, values, size = "Q6_K", 256, 210

    @staticmethod
    def unpack(blocks: Tensor) -> Tensor:
        """As `Blocks.unpack`: d scale (q - 32)."""
        low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)  # halves, quarters
        high = (
            blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu")[:, None]
        )
        codes = (low | (high & 3) << 4).float().sub_(32).view(-1, 16, 16)  # (blocks, sub-blocks, values)
        scales = blocks[:, 192:208].view(torch.int8) * _float16(blocks, 208)  # (blocks, 16)
        return codes.mul_(scales[..., None]).flatten(1)


BLOCKS: dict[int, type[Blocks]] = {2: Q4_0, 3: Q4_1, 6: Q5_0, 7: Q5_1, 8: Q8_0, 12: Q4_K, 13: Q5_K, 14: Q6_K}
