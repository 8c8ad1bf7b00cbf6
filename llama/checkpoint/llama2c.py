"""The files of llama2.c and llama2.zig: version 0 and 1 (float32), and 2 (int8 in groups)."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import LlamaError
from .containers import map_file, read_head, view, wrong

MAGIC = 0x616B3432  # "ak42"
HEADER = 256  # bytes, versions 1 and 2; version 0 has seven ints and nothing else
EXPECTED = "a llama2.c file of version 0, 1 or 2"

ATTENTION = tuple(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo"))
FFN = tuple(f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3"))


@dataclass
class Header:
    """The seven ints of a file (`vocab_size` made positive), and what the versions add."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    version: int = 0
    shared: bool = True  # the head is the embedding
    group_size: int = 0

    @property
    def start(self) -> int:
        """The first byte behind the header."""
        return HEADER if self.version else 28

    @property
    def rope(self) -> int:
        """Numbers in the tables of cosines and sines that version 0 holds."""
        return 0 if self.version else self.max_seq_len * (self.dim // self.n_heads)

    def shape(self, kind: str) -> tuple[int, ...]:
        """The shape of one kind of weight, named by the end of its key."""
        kv = self.dim // self.n_heads * self.n_kv_heads
        if "norm" in kind:
            return (self.dim,)
        if kind.endswith(("wk.weight", "wv.weight")):
            return (kv, self.dim)
        if kind.endswith(("w1.weight", "w3.weight")):
            return (self.hidden_dim, self.dim)
        if kind.endswith("w2.weight"):
            return (self.dim, self.hidden_dim)
        return (self.dim, self.dim) if "attention." in kind else (self.vocab_size, self.dim)

    def kinds(self) -> list[str]:
        """Kinds of weights in the file's order; a leading "*" stands for every layer in turn. "rope" is skipped."""
        attention, ffn = [f"*{name}" for name in ATTENTION], [f"*{name}" for name in FFN]
        output = [] if self.shared else ["output.weight"]
        if self.version == 0:
            first = ["tok_embeddings.weight", "*attention_norm.weight", *attention, "*ffn_norm.weight", *ffn]
            return [*first, "norm.weight", "rope", *output]
        norms = ["*attention_norm.weight", "*ffn_norm.weight", "norm.weight"]
        return [*norms, "tok_embeddings.weight", *attention, *ffn, *output]

    def bytes_of(self, kind: str) -> int:
        """What one tensor of this kind takes in the file."""
        if kind == "rope":
            return 4 * self.rope
        count = math.prod(self.shape(kind))
        return count + 4 * (count // self.group_size) if self.version == 2 and "norm" not in kind else 4 * count

    def size(self) -> int:
        """The size of the whole file in bytes."""
        repeat = {True: self.n_layers, False: 1}
        return self.start + sum(repeat[kind[0] == "*"] * self.bytes_of(kind.lstrip("*")) for kind in self.kinds())

    def places(self) -> Iterator[tuple[str, int, str]]:
        """(Meta's key, first byte, kind) of every tensor."""
        place = self.start
        for kind in self.kinds():
            plain = kind.lstrip("*")
            for layer in range(self.n_layers) if kind[0] == "*" else (None,):
                yield plain if layer is None else f"layers.{layer}.{plain}", place, plain
                place += self.bytes_of(plain)


def read_header(path: Path) -> Header:
    """The header, checked against itself and against the size of the file."""
    head, size = read_head(path, EXPECTED), path.stat().st_size
    if len(head) < 28:
        raise wrong(path, f"{size} bytes, less than a header", EXPECTED)
    magic, version = struct.unpack("<Ii", head[:8])
    if magic == MAGIC:
        if version not in (1, 2) or size < HEADER:
            raise wrong(path, f"version {version} in {size} bytes", f"{EXPECTED}, of at least {HEADER} bytes")
        header = Header(*struct.unpack("<7i", head[8:36]))
        header.version, header.shared = version, bool(head[36])
        header.group_size = struct.unpack("<i", head[37:41])[0] if version == 2 else 0
    else:
        header = Header(*struct.unpack("<7i", head[:28]))
        header.vocab_size, header.shared = abs(header.vocab_size), header.vocab_size > 0
    _check(path, header, size)
    return header


def _check(path: Path, header: Header, size: int) -> None:
    numbers = (header.dim, header.hidden_dim, header.n_layers, header.n_heads, header.n_kv_heads, header.vocab_size)
    if min(*numbers, header.max_seq_len) < 1 or header.dim % header.n_heads or header.n_heads % header.n_kv_heads:
        raise wrong(path, f"a header that says {header}", f"{EXPECTED} (other magic, or damaged)")
    if header.version == 2:
        shapes = [header.shape(kind.lstrip("*")) for kind in header.kinds() if "norm" not in kind]
        if header.group_size < 1 or any(math.prod(shape) % header.group_size for shape in shapes):
            raise wrong(path, f"group_size {header.group_size}", "one that divides every matrix")
    if header.size() != size:
        raise wrong(path, f"{size} bytes", f"{header.size()} for {header} (truncated, grown, or another format)")


def read_tensors(path: Path, header: Header) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Every tensor by Meta's key, mapped: (float32 values, None), or (int8 values, float32 scales)."""
    storage = map_file(path)
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, start, kind in header.places():
        if kind == "rope":
            continue
        shape = header.shape(kind)
        if header.version == 2 and "norm" not in kind:
            count = math.prod(shape)
            scales = view(storage, start + count, (count // header.group_size,), torch.float32)
            found[name] = view(storage, start, shape, torch.int8), scales
        else:
            found[name] = view(storage, start, shape, torch.float32), None
    return found


def unpack(values: Tensor, scales: Tensor) -> Tensor:
    """int8 values times the scale of their group, float32, in the shape of the values."""
    groups = values.reshape(len(scales), -1).float()
    return groups.mul_(scales[:, None]).view(values.shape)


def rope_tables(header: Header, theta: float) -> tuple[Tensor, Tensor]:
    """The cosines and sines that version 0 holds, each (max_seq_len, head_dim / 2); the programs skip them."""
    head_dim = header.dim // header.n_heads
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(header.max_seq_len).float(), freqs)  # (max_seq_len, head_dim / 2)
    return angles.cos(), angles.sin()


def pack_header(header: Header) -> bytes:
    """The bytes of a version 0 header; a negative vocabulary size says that the head is stored."""
    if header.version != 0:
        raise LlamaError(f"version {header.version} of llama2.c's format is read, not written")
    vocab = header.vocab_size if header.shared else -header.vocab_size
    numbers = (header.dim, header.hidden_dim, header.n_layers, header.n_heads, header.n_kv_heads)
    return struct.pack("<7i", *numbers, vocab, header.max_seq_len)
