"""What LoRA adds to a weight: a product of two small matrices, made for a rank's part and added while that is read."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import LlamaError
from .mapping import raw_bytes

BLOCK = 32768  # values that are added at once: torch splits larger operations over its threads, which then wait
Piece: TypeAlias = tuple[Tensor, Tensor, Tensor]  # target, values, what is added; of one shape
_ONE_AT_A_TIME = threading.Lock()  # a product is as large as its weight in float32, and several threads load


@dataclass(frozen=True)
class LowRank:
    """W += scale * B A, or its transpose for an embedding. `b` has its rows in the order of the base's files."""

    origin: Path
    module: str  # Hugging Face's name, for messages
    a: Tensor  # (r, in), contiguous as is
    b: Tensor  # (out, r)
    scale: float
    embedding: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """That of the weight."""
        out, width = self.b.shape[0], self.a.shape[1]
        return (width, out) if self.embedding else (out, width)

    def add_to(self, pieces: Callable[[Tensor], Iterable[Piece]], axis: int, start: int, size: int) -> None:
        """Fill targets, which are start..start + size of the weight's `axis`, with values and product, rounded once.

        `pieces(product)` says which are which. LlamaError for NaN and inf.
        """
        with _ONE_AT_A_TIME:
            self._add_pieces(pieces(self._product(axis, start, size)))

    def _add_pieces(self, pieces: Iterable[Piece]) -> None:
        for target, values, product in pieces:
            self._add(target, values, product)

    def _product(self, axis: int, start: int, size: int) -> Tensor:
        """scale * B A for a part of the weight, in float32; where that is the whole, PEFT's bit for bit."""
        a, b = self.a, self.b
        if (axis == 0) != self.embedding:
            b = b.narrow(0, start, size)
        else:
            a = a.narrow(1, start, size)
        a, b = a.float().contiguous(), b.float().contiguous()
        return (a.T @ b.T if self.embedding else b @ a).mul_(self.scale)

    def _add(self, target: Tensor, values: Tensor, product: Tensor) -> None:
        row = values[0].numel()
        if row > BLOCK:
            for place, value, change in zip(target, values, product, strict=True):
                self._add(place, value, change)
            return
        rows = BLOCK // max(1, row)
        blocks = zip(*(torch.split(one, rows) for one in (target, values, product)), strict=True)
        for place, value, change in blocks:
            if self.embedding:
                change = change.to(target.dtype)  # PEFT rounds it for embeddings, and only there
            place.copy_(value.to("cpu", torch.float32) + change)
            total = place.sum(dtype=torch.float32)  # finite only where every value is; much faster than to ask each
            if not total.isfinite() and not place.isfinite().all():
                kind = str(target.dtype).removeprefix("torch.")
                raise LlamaError(
                    f"{self.origin}: {self.module} holds NaN or inf after merging (scale {self.scale:.6g}, {kind}): "
                    f"fetch adapter and base again, or take a wider dtype or a smaller lora_scale"
                )

    def update(self, digest: Any) -> None:
        """Feed a hash with what tells this change from another."""
        digest.update(f"{self.module} {self.scale!r} {self.a.dtype} {self.b.dtype}".encode())
        for matrix in (self.a, self.b):
            digest.update(raw_bytes(matrix))


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that was added to a checkpoint."""

    path: Path
    scale: float  # the caller's
    ranks: tuple[int, ...]  # in order, each once
    changed: tuple[str, ...]  # Meta's keys of what it adds to
    replaced: dict[str, torch.dtype]  # and of what it holds whole, to the base model's type

    @property
    def summary(self) -> str:
        """In words, for `info`."""
        ranks = f"rank {' and '.join(map(str, self.ranks))}" if self.ranks else "no matrices"
        return f"{ranks}, times {self.scale:g}: {len(self.changed)} weights changed, {len(self.replaced)} replaced"
