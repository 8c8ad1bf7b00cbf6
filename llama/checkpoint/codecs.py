"""Weights that files hold quantized: one class for each way of storing them, and the table of those in Meta's files."""

import torch
from torch import Tensor

from ..quantization import GROUPS, dequantize, quantize_int4, quantize_int8


class Codec:
    """A matrix (n, k) as quantized values and their scales. Another way of storing one is another subclass."""

    name: str  # for messages
    scheme: str | None = None  # of the kernels that multiply with these values as they are; None: dequantize first

    def __init__(self, qvalues: Tensor, scales: Tensor) -> None:
        self.qvalues, self.scales = qvalues, scales

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the dequantized values."""
        return tuple(self.qvalues.shape)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """What the file holds, for giving its pages back."""
        return self.qvalues, self.scales

    def dequantize(self) -> Tensor:
        """The values, float32."""
        return dequantize(self.qvalues, self.scales)

    def rows(self, start: int, stop: int) -> Tensor:
        """Those of some rows, float32."""
        return dequantize(self.qvalues[start:stop], self.scales[start:stop])

    def for_scheme(self, scheme: str) -> "Codec | None":
        """The same values as kernels take them; None: dequantize, and quantize as `scheme` says."""
        return self if self.scheme else None

    def shard(self, axis: int, rank: int, world: int) -> "Codec":
        """A rank's part, still quantized. ValueError where that would split a group."""
        raise NotImplementedError


class Int8Groups(Codec):
    """llama2.c's q80: int8, and a float32 scale for each group of consecutive values, over the ends of rows."""

    name = "int8 groups"

    def dequantize(self) -> Tensor:
        """The values, float32."""
        groups = self.qvalues.reshape(len(self.scales), -1).float()
        return groups.mul_(self.scales[:, None]).view(self.qvalues.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """As `Codec.rows`."""
        some, size = self.qvalues[start:stop], self.qvalues.numel() // len(self.scales)
        first = start * self.qvalues[0].numel()
        groups = torch.arange(first, first + some.numel(), device="cpu") // size  # of each value
        return some.float().mul_(self.scales[groups].view(some.shape))


class Int8Rows(Codec):
    """`quantize_int8`: int8 (n, k), and a scale for each row (n,)."""

    name = scheme = "int8"
    quantize = staticmethod(quantize_int8)

    @staticmethod
    def fits(qvalues: Tensor, scales: Tensor) -> bool:
        """Whether these are values and scales as `quantize_int8` makes them."""
        return _types(qvalues, scales) == (torch.int8, 2, True) and scales.shape == qvalues.shape[:1]

    def shard(self, axis: int, rank: int, world: int) -> "Int8Rows":
        """As `Codec.shard`: a row's scale goes with every part of the row."""
        scales = self.scales if axis == 1 else _shard(self.scales, 0, rank, world)
        return Int8Rows(_shard(self.qvalues, axis, rank, world), scales)


class Int4Groups(Codec):
    """`quantize_int4`: uint8 (n, k / 2), two values to a byte, and scale and zero of each group (n, k / group, 2)."""

    name = scheme = "int4"
    quantize = staticmethod(quantize_int4)

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Codec.shape`."""
        return (*self.qvalues.shape[:-1], 2 * self.qvalues.shape[-1])

    @staticmethod
    def fits(qvalues: Tensor, scales: Tensor) -> bool:
        """Whether these are values and scales as `quantize_int4` makes them."""
        if _types(qvalues, scales) != (torch.uint8, 2, True):
            return False
        rows, columns = qvalues.shape[0], 2 * qvalues.shape[1]
        return any(scales.shape == (rows, columns // group, 2) for group in GROUPS if columns % group == 0)

    def shard(self, axis: int, rank: int, world: int) -> "Int4Groups":
        """As `Codec.shard`."""
        groups = self.scales.shape[1]
        if axis == 1 and groups % world:
            raise ValueError(f"{groups} groups of int4 cannot be sharded over {world} ranks: start fewer, or use int8")
        return Int4Groups(_shard(self.qvalues, axis, rank, world), _shard(self.scales, axis, rank, world))


META_CODECS: tuple[type[Int8Rows | Int4Groups], ...] = (Int8Rows, Int4Groups)  # what `convert --quantize` writes


def _types(qvalues: Tensor, scales: Tensor) -> tuple[torch.dtype, int, bool]:
    return qvalues.dtype, qvalues.ndim, scales.is_floating_point()


def _shard(tensor: Tensor, axis: int, rank: int, world: int) -> Tensor:
    return tensor.chunk(world, axis)[rank].contiguous()
