"""An opened checkpoint, whatever its format: a stream of named weights, each made from what files hold of it.

One weight at a time goes this way; every step is one function here (or a codec's)::

    parts of the weight in the files   mapped tensors, or codecs of quantized ones; `StoredWeight`
    slice                              what this rank needs of each part
    dequantize                         `Codec.dequantize`
    merge                              LoRA: what adapters add, rounded once to the type it is placed in; `LowRank`
    permute                            wq and wk of Hugging Face's order: `halves_to_pairs`
    place                              merged, cast and copied where it belongs (`copy`), the file's pages given back

A rank's part is sharded, and files hold it side by side, along an axis of the table::

    file 0   file 1                    wq wk wv w1 w3 output: rows        wo w2 tok_embeddings: columns
    +-----+ +-----+                       +---------+ rank 0                    +----+----+
    |     | |     |  side by side         |---------|                           |    |    |
    +-----+ +-----+                       +---------+ rank 1                    +----+----+
                                                                                rank 0  rank 1
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import LlamaError
from .codecs import Codec
from .files import Stamp, format_error, stamp
from .lowrank import Adapter, LowRank
from .mapping import drop_pages
from .table import weight_spec

DEQUANTIZE_STEP = 1 << 18  # values; the intermediate tensors then stay in the cache
COPY_STEP = 32768  # values; torch splits larger copies over all its threads, which then wait for each other


def copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`; on a CPU in steps that one thread does, so that several can be at it side by side.

    On two busy cores torch's own splitting was three times slower: each step waits for a thread that is not running.
    """
    row = source[0].numel() if source.ndim else 1
    if target.device.type != "cpu" or source.numel() <= COPY_STEP:
        target.copy_(source)
    elif row > COPY_STEP:
        for target_row, source_row in zip(target, source, strict=True):
            copy(target_row, source_row)
    else:  # one call for all steps: a Python call for each would cost as much as the step
        torch._foreach_copy_(torch.split(target, COPY_STEP // row), torch.split(source, COPY_STEP // row))


def halves_to_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of wq or wk from Hugging Face's order (i, i + k/2) to Meta's (2i, 2i + 1): a view (heads, k/2, 2, dim)."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2)


def pairs_to_halves(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `halves_to_pairs`, in the weight's own shape."""
    return as_halves(weight, heads).reshape(weight.shape)


def as_halves(weight: Tensor, heads: int) -> Tensor:
    """A weight in Meta's order, its rows seen in Hugging Face's: a view (heads, 2, k/2, dim)."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2)


class Slice(NamedTuple):
    """`size` rows (or columns) from `start` of one stored part."""

    part: Tensor | Codec
    axis: int
    start: int
    size: int

    def values(self) -> Tensor:
        """Dequantized where they have to be; a view of the file's pages otherwise."""
        values = [values for _, values in self.pieces()]
        return values[0] if len(values) == 1 else torch.cat(values)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """First row and values of some rows after another: what is dequantized need not be there as a whole."""
        part, axis = self.part, self.axis
        if isinstance(part, Tensor):
            yield 0, part.narrow(axis, self.start, self.size)
            return
        first, last = (self.start, self.start + self.size) if axis == 0 else (0, part.shape[0])
        step = max(1, DEQUANTIZE_STEP // math.prod(part.shape[1:]))
        for start in range(first, last, step):
            values = part.rows(start, min(start + step, last))
            yield start - first, values.narrow(axis, self.start, self.size) if axis else values


def _drop_pages(part: Tensor | Codec) -> None:
    for tensor in part.stored if isinstance(part, Codec) else (part,):
        drop_pages(tensor)


@dataclass
class StoredWeight:
    """What files hold of one weight: parts that lie side by side along `axis`."""

    parts: Sequence[Tensor | Codec]
    axis: int = 0
    hf_heads: int = 0  # above 0: rows are in Hugging Face's order, for this many heads
    changes: tuple[LowRank, ...] = ()  # of LoRA adapters, in the order in which they are added

    @property
    def codec(self) -> Codec | None:
        """The part where it is a quantized one."""
        return self.parts[0] if isinstance(self.parts[0], Codec) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values, all parts together."""
        shape = list(self.parts[0].shape)
        if shape:
            shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        """That of the values: float32 where they are dequantized."""
        return self.parts[0].dtype if isinstance(self.parts[0], Tensor) else torch.float32

    def slices(self, axis: int, start: int, size: int) -> list[Slice]:
        """What makes up start..start + size along `axis`, in order."""
        if axis != self.axis:
            return [Slice(part, axis, start, size) for part in self.parts]
        found, offset = [], 0
        for part in self.parts:
            first, last = max(start - offset, 0), min(start + size - offset, part.shape[axis])
            if first < last:
                found.append(Slice(part, axis, first, last - first))
            offset += part.shape[axis]
        return found


def _stored_pieces(
    slices: list[Slice], weight: StoredWeight, target: Tensor, product: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each stored piece: where it belongs, its values, what is added. Without slices `target` holds the values."""
    product, offset = product.view(target.shape), 0
    if not slices:
        yield target, target, product
    for one in slices:
        if weight.hf_heads:
            yield target, one.values().view(target.shape), product
            continue
        extent = one.size if one.axis == weight.axis else one.part.shape[weight.axis]
        place, part = (whole.narrow(weight.axis, offset, extent) for whole in (target, product))
        offset += extent
        for row, values in one.pieces():  # what is dequantized need not be there as a whole
            yield place.narrow(0, row, len(values)), values, part.narrow(0, row, len(values))


@dataclass
class Checkpoint:
    """An opened checkpoint: headers are read and checked, values are mapped and read when touched.

    `params` are ModelArgs fields as stored (`vocab_size` may be -1), `context` the longest window where the format
    tells. A tensor from `read` may be the file's own pages: do not write to it.
    """

    path: Path
    format: str  # "meta", "hf", "gguf", "llama2c" or "llama2c-train"
    params: dict[str, Any]
    weights: dict[str, StoredWeight]
    files: list[Path]
    context: int | None = None
    mapped: bool = True  # every part is; some old files are read instead
    tokenizer_path: Path | None = None
    in_use: bool = False  # a model uses the mapped pages
    adapters: tuple[Adapter, ...] = ()  # that `weights` have in them already
    stamps: dict[Path, Stamp | None] = field(default_factory=dict)  # of files as they were when opened
    chat_template: str | None = None  # Jinja's, where the weights' own file holds one
    tokenizer_source: Callable[[], tuple[bytes, dict[str, Any]]] | None = None  # makes `tokenizer_data`, and may raise

    @cached_property
    def tokenizer_data(self) -> tuple[bytes, dict[str, Any]] | None:
        """A tokenizer's file and facts for `Tokenizer.from_bytes`, where the weights' own file holds them.

        Made when it is asked for: a tokenizer that cannot be followed is an error only for who wants it.
        """
        return self.tokenizer_source() if self.tokenizer_source else None

    def __post_init__(self) -> None:
        for file in self.files:
            self.stamps.setdefault(file, stamp(file))

    def check_unchanged(self) -> None:
        """LlamaError where a file was written to, or cut, since it was opened: weights would be of two versions, and a
        page behind its end would end the process. One that has another in its place stays mapped as it was.
        """
        for file, before in self.stamps.items():
            now = stamp(file)
            if before and now and now != before and now[:2] == before[:2]:
                found = "the file was written to after it was opened"
                raise format_error(file, found, "one that nobody writes: try again once it is whole")

    @property
    def folder(self) -> Path:
        """Where the files are that belong to it."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def shards(self) -> int:
        """Files of weights."""
        return len(self.files)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding, stored once."""
        return self.weights["output.weight"] is self.weights["tok_embeddings.weight"]

    @property
    def quantized(self) -> str | None:
        """ "int8" or "int4" where the layers' weights are stored so (`convert --quantize`)."""
        codecs = (weight.codec for name, weight in self.weights.items() if name.startswith("layers."))
        return next((codec.scheme for codec in codecs if codec), None)  # an adapter may have replaced some

    def names(self) -> list[str]:
        """Meta's keys, in the order of the model's `state_dict`."""
        return list(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape, all shards and ranks together."""
        return self.weights[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored type; float32 where quantized values are dequantized."""
        return self.weights[name].dtype

    def written_dtype(self, name: str) -> torch.dtype:
        """The type to write it in: the stored one, but the base model's where an adapter holds it whole."""
        return next((one.replaced[name] for one in self.adapters if name in one.replaced), self.dtype(name))

    def local_shape(self, name: str, world: int) -> tuple[int, ...]:
        """The shape of each rank's part; LlamaError where it cannot be sharded over `world` ranks."""
        shape, axis = list(self.shape(name)), weight_spec(name).axis
        heads = self.weights[name].hf_heads
        if axis is not None:
            if shape[axis] % world or heads % world:
                count = f"{heads} heads" if heads else f"size {shape[axis]} along axis {axis}"
                found = f"{name}: {count} cannot be sharded over {world} ranks"
                raise LlamaError(f"{found}: start a number that divides it")
            shape[axis] //= world
        return tuple(shape)

    def _slices(self, name: str, rank: int, world: int) -> list[Slice]:
        self.check_unchanged()
        axis, shape = weight_spec(name).axis, self.local_shape(name, world)
        return self.weights[name].slices(axis or 0, 0 if axis is None else rank * shape[axis], shape[axis or 0])

    def in_one_part(self, name: str, rank: int, world: int) -> Tensor | None:
        """This rank's part where one part of the files holds all of it, in Meta's order, unchanged; else None."""
        weight, slices = self.weights[name], self._slices(name, rank, world)
        return slices[0].values() if len(slices) == 1 and not weight.hf_heads and not weight.changes else None

    def read(self, name: str, rank: int = 0, world: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part in Meta's order: the mapped pages themselves where they are that part; else a copy, of
        `dtype` (None: the stored type), to which what adapters add is rounded.
        """
        part = self.in_one_part(name, rank, world)
        if part is None:
            part = torch.empty(self.local_shape(name, world), dtype=dtype or self.dtype(name), device="cpu")
            self.read_into(part, name, rank, world)
        return part

    def read_into(self, target: Tensor, name: str, rank: int = 0, world: int = 1) -> None:
        """Copy this rank's part into `target`, in Meta's order and the type of `target`; pages are given back."""
        weight, offset = self.weights[name], 0
        if weight.changes:
            self._merge_into(target, name, rank, world)
            return
        for one in self._slices(name, rank, world):
            shape = list(one.part.shape)
            if shape:
                shape[one.axis] = one.size
            place = target.narrow(weight.axis, offset, shape[weight.axis])
            offset += shape[weight.axis]
            if weight.hf_heads:
                values = halves_to_pairs(one.values(), weight.hf_heads // world)
                copy(place.view(values.shape), values)
            else:
                for row, values in one.pieces():
                    copy(place.narrow(0, row, len(values)), values)
            if self.mapped:
                _drop_pages(one.part)

    def _merge_into(self, target: Tensor, name: str, rank: int, world: int) -> None:
        """`read_into` with what adapters add, one after another, in the order of the files' rows."""
        weight, axis = self.weights[name], weight_spec(name).axis or 0
        if weight.hf_heads:
            target = as_halves(target, weight.hf_heads // world)
        slices, size = self._slices(name, rank, world), self.local_shape(name, world)[axis]
        for index, change in enumerate(weight.changes):
            stored = partial(_stored_pieces, [] if index else slices, weight, target)
            change.add_to(stored, axis, rank * size, size)
        self.drop_pages(name)

    def quantized_shard(self, name: str, rank: int = 0, world: int = 1, scheme: str = "") -> Codec | None:
        """This rank's part as kernels of the stored scheme (or else of `scheme`) take it, if its codes will do.

        ValueError where a group would be split.
        """
        codec, axis = self.weights[name].codec, weight_spec(name).axis
        kept = codec.for_scheme(scheme) if codec and axis is not None and not self.weights[name].changes else None
        return kept.shard(axis, rank, world) if kept and axis is not None else None

    def drop_pages(self, name: str) -> None:
        """Give back the memory of a weight's pages, once what was read from them has been used."""
        for part in self.weights[name].parts if self.mapped else ():
            _drop_pages(part)

    def merging_bytes(self, world: int = 1) -> int:
        """The most that a rank holds beside its model while adapters are merged: one product in float32."""
        changed = [name for name, weight in self.weights.items() if weight.changes]
        return max((4 * math.prod(self.local_shape(name, world)) for name in changed), default=0)

    def check_world(self, label: str, world: int) -> None:
        """LlamaError where the weights cannot be sharded over `world` ranks or files; `label` names the number."""
        heads, kv_heads = self.params["n_heads"], self.params["n_kv_heads"] or self.params["n_heads"]
        if heads % world or kv_heads % world:
            raise LlamaError(f"{label}={world} must divide n_heads={heads} and n_kv_heads={kv_heads}")
        for name in self.names():
            self.local_shape(name, world)
