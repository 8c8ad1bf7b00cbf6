"""What a checkpoint holds, whatever its format: per key of Meta's, mapped tensors lying side by side along an axis.

A rank's part is cut from them when it is asked for::

    file 0   file 1                    wq wk wv w1 w3 output: rows        wo w2 tok_embeddings: columns
    +-----+ +-----+                       +---------+ rank 0                    +----+----+
    |     | |     |  side by side         |---------|                           |    |    |
    +-----+ +-----+                       +---------+ rank 1                    +----+----+
                                                                                rank 0  rank 1
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import LlamaError
from ..quantization import dequantize
from .containers import drop_pages
from .llama2c import unpack
from .memory import ffn_width


class WeightSpec(NamedTuple):
    """One kind of weight: its key in Meta's files, in Hugging Face's, the axis it is cut along, its full shape."""

    key: str
    hf: str
    axis: int | None  # None: every rank and every file holds it whole
    shape: tuple[str, ...]  # names of `sizes`


TABLE = (
    WeightSpec("tok_embeddings.weight", "model.embed_tokens.weight", 1, ("vocab", "dim")),
    WeightSpec("layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight", 0, ("dim", "dim")),
    WeightSpec("layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight", 0, ("kv", "dim")),
    WeightSpec("layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight", 0, ("kv", "dim")),
    WeightSpec("layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight", 1, ("dim", "dim")),
    WeightSpec("layers.{}.feed_forward.w1.weight", "model.layers.{}.mlp.gate_proj.weight", 0, ("ffn", "dim")),
    WeightSpec("layers.{}.feed_forward.w2.weight", "model.layers.{}.mlp.down_proj.weight", 1, ("dim", "ffn")),
    WeightSpec("layers.{}.feed_forward.w3.weight", "model.layers.{}.mlp.up_proj.weight", 0, ("ffn", "dim")),
    WeightSpec("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight", None, ("dim",)),
    WeightSpec("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight", None, ("dim",)),
    WeightSpec("norm.weight", "model.norm.weight", None, ("dim",)),
    WeightSpec("output.weight", "lm_head.weight", 0, ("vocab", "dim")),
)
WEIGHT_SPECS = {row.key: row for row in TABLE}
IGNORABLE = re.compile(r"rope\.freqs|layers\.\d+\.attention\.inner_attention\.rope\.freqs|.*rotary_emb\.inv_freq")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def weight_spec(name: str) -> WeightSpec:
    """The table's row for a key of Meta's; KeyError where there is none."""
    return WEIGHT_SPECS[re.sub(r"^layers\.\d+\.", "layers.{}.", name)]


def hf_name(name: str) -> str:
    """Hugging Face's name for a key of Meta's."""
    return weight_spec(name).hf.format(*re.findall(r"^layers\.(\d+)", name))


def all_names(n_layers: int) -> list[str]:
    """Meta's keys in the order of the model's `state_dict`."""
    first, layer, last = TABLE[:1], TABLE[1:10], TABLE[10:]
    middle = [row.key.format(index) for index in range(n_layers) for row in layer]
    return [*(row.key for row in first), *middle, *(row.key for row in last)]


def ffn_settings(dim: int, width: int) -> dict[str, Any]:
    """`multiple_of` and `ffn_dim_multiplier` that give a feed-forward of this width, the published ones if they do."""
    for multiplier in (None, 1.3, 1.5, 1.0):
        for multiple_of in (256, 1024, 4096):
            if ffn_width(dim, multiple_of, multiplier) == width:
                return {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}
    base = int(2 * 4 * dim / 3)
    return {"multiple_of": width, "ffn_dim_multiplier": None if base <= width else (width + 0.5) / base}


def sizes(params: Mapping[str, Any], vocab: int) -> dict[str, int]:
    """What the names in the table's shapes stand for."""
    heads = params["n_heads"]
    kv = params.get("n_kv_heads") or heads
    ffn = ffn_width(params["dim"], params["multiple_of"], params["ffn_dim_multiplier"])
    return {"dim": params["dim"], "kv": params["dim"] // heads * kv, "ffn": ffn, "vocab": vocab}


@dataclass
class Entry:
    """Where the values of one key lie: tensors side by side along `axis`, mapped."""

    parts: list[Tensor]
    axis: int = 0
    heads: int = 0  # above 0: rows are in Hugging Face's pair order, for this many heads
    scales: Tensor | None = None  # parts are codes: of `form`, else int8 with a scale per group of consecutive values
    scheme: str | None = None  # "int8" or "int4": codes and scales as quantize.py makes them

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values, all parts together, unpacked."""
        shape = list(self.parts[0].shape)
        if shape:
            shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
            shape[-1] *= 1 + (self.scheme == "int4")
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        """That of the values as `pieces` hands them out."""
        return self.parts[0].dtype if self.scales is None else torch.float32

    @property
    def stored_as_used(self) -> bool:
        """Whether a model can compute with the mapped values as they lie."""
        return self.heads == 0 and self.scales is None

    def pieces(self, cut: int | None, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The tensors that make up start..stop along axis `cut`, each with its place along `axis` of the result."""
        place = begin = 0
        for part in self.parts:
            end = begin + part.shape[self.axis]
            if self.scales is not None:
                part = dequantize(part, self.scales) if self.scheme == "int4" else unpack(part, self.scales)
            if cut is None:
                piece = part
            elif cut == self.axis:
                low, high = max(start, begin), min(stop, end)
                piece = part.narrow(cut, low - begin, high - low) if low < high else part[:0]
            else:
                piece = part.narrow(cut, start, stop - start)
            begin = end
            if piece.numel():
                yield place, piece
                place += piece.shape[self.axis]


GRAIN = 32768  # values; torch splits larger copies over all its threads, which then wait for each other


def copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`; on a CPU in steps that one thread does, so that several can be at it side by side.

    On two busy cores torch's own splitting was three times slower: each step waits for a thread that is not running.
    """
    row = source[0].numel() if source.ndim else 1
    if target.device.type != "cpu" or source.numel() <= GRAIN:
        target.copy_(source)
    elif row > GRAIN:
        for some_target, some_source in zip(target, source, strict=True):
            copy(some_target, some_source)
    else:  # one call for all steps: a Python call a step would cost as much as the step
        torch._foreach_copy_(torch.split(target, GRAIN // row), torch.split(source, GRAIN // row))


def halves_to_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of wq or wk from Hugging Face's pair order (i, i + k/2) to Meta's (2i, 2i + 1): a view (n, k/2, 2, dim)."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2)


def pairs_to_halves(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `halves_to_pairs`, as a matrix again."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


@dataclass
class Checkpoint:
    """An opened checkpoint: headers are read and checked, values are mapped and read when touched.

    `params` are ModelArgs fields as stored (`vocab_size` may be -1), `context` the longest window where the format
    tells. A tensor from `read` may be the file's own pages: do not write to it.
    """

    path: Path
    format: str  # "meta", "hf", "llama2c" or "llama2c-train"
    params: dict[str, Any]
    entries: dict[str, Entry]
    files: list[Path]
    context: int | None = None
    tokenizer_path: Path | None = None
    unexpected: list[str] = field(default_factory=list)
    mapped: bool = True  # every part is; some old files are read instead
    taken: bool = False  # a model uses the mapped pages

    @property
    def shards(self) -> int:
        """Files of weights."""
        return len(self.files)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding, stored once."""
        return self.entries["output.weight"] is self.entries["tok_embeddings.weight"]

    def names(self) -> list[str]:
        """Meta's keys, in the order of the model's `state_dict`."""
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape, all shards and ranks together."""
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored type; float32 where int8 groups are unpacked."""
        return self.entries[name].dtype

    def local_shape(self, name: str, world: int) -> tuple[int, ...]:
        """The shape of each rank's part; LlamaError where it cannot be cut into `world`."""
        shape, axis = list(self.shape(name)), weight_spec(name).axis
        heads = self.entries[name].heads
        if axis is not None:
            if shape[axis] % world or heads % world:
                count = f"{heads} heads" if heads else f"size {shape[axis]} along axis {axis}"
                raise LlamaError(f"{name}: {count} cannot be cut over {world} ranks: start a number that divides it")
            shape[axis] //= world
        return tuple(shape)

    def pieces(self, name: str, rank: int, world: int) -> Iterator[tuple[int, Tensor]]:
        """The stored tensors of this rank's part, each with its place along the entry's axis."""
        axis = weight_spec(name).axis
        size = self.local_shape(name, world)[axis or 0]
        return self.entries[name].pieces(axis, rank * size, (rank + 1) * size)

    def read(self, name: str, rank: int = 0, world: int = 1) -> Tensor:
        """This rank's part in Meta's pair order: the mapped pages themselves where they are that part, else a copy."""
        entry = self.entries[name]
        pieces = list(self.pieces(name, rank, world))
        if len(pieces) == 1 and not entry.heads:
            return pieces[0][1]
        part = torch.empty(self.local_shape(name, world), dtype=entry.dtype, device="cpu")
        self.fill(part, name, pieces, world)
        return part

    @property
    def quantized(self) -> str | None:
        """ "int8" or "int4" where the layers' weights are stored so (`convert --quantize`)."""
        return self.entries["layers.0.attention.wq.weight"].scheme

    def codes(self, name: str, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """This rank's codes and scales of a quantized weight. ValueError where the cut would go through a group."""
        entry, axis = self.entries[name], weight_spec(name).axis
        codes, scales = entry.parts[0], entry.scales
        assert scales is not None and axis is not None
        if axis == 1 and entry.scheme == "int4" and scales.shape[1] % world:
            raise ValueError(
                f"{scales.shape[1]} groups of int4 cannot be cut over {world} ranks: start fewer, or use int8"
            )
        codes = codes.chunk(world, axis)[rank].contiguous()
        if axis == 0 or entry.scheme == "int4":  # a row's one scale in int8 goes with every part of the row
            scales = scales.chunk(world, axis)[rank].contiguous()
        return codes, scales

    def fill(self, part: Tensor, name: str, pieces: Iterable[tuple[int, Tensor]], world: int) -> None:
        """Copy the pieces to their places in `part`, in Meta's pair order, giving back each one's pages."""
        entry = self.entries[name]
        for place, piece in pieces:
            source = halves_to_pairs(piece, entry.heads // world) if entry.heads else piece
            copy(part.narrow(entry.axis, place, piece.shape[entry.axis]).view(source.shape), source)
            if self.mapped and entry.scales is None:
                drop_pages(piece)

    def forget(self, name: str) -> None:
        """Give back the memory of a tensor's pages, once what was read from them has been used."""
        for part in self.entries[name].parts if self.mapped else ():
            drop_pages(part)


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, and how many there are beside them, for a message."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def compare(path: Path, stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """LlamaError naming the first few weights that are wanted and missing, or stored in another shape."""
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise LlamaError(f"{path}: {len(missing)} weights are missing: {some(missing)}")
    bad = [name for name, shape in wanted.items() if tuple(stored[name]) != tuple(shape)]
    if bad:
        shapes = (f"{name} is {tuple(stored[name])}, must be {tuple(wanted[name])}" for name in bad)
        raise LlamaError(f"{path}: {len(bad)} weights have the wrong shape: {some(shapes, 3)}")
