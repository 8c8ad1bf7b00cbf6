"""GGUF files (llama.cpp's): metadata, and a table of tensors, checked before any is mapped. No word of Llama in here.

magic "GGUF", version, tensor count, metadata count; the metadata: key, type, value; for each tensor: name, dimensions
(fastest first), type, offset; then, aligned, the data. Source: ggml's docs/gguf.md.
"""

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .codecs import Codec
from .files import format_error, read_head
from .ggml_codecs import BLOCKS, FOREIGN_TYPES, PLAIN
from .mapping import map_file, tensor_at

EXPECTED = "a GGUF file of version 2 or 3, little-endian, as llama.cpp writes it"
MAX_ENTRIES = 1 << 16  # keys, or tensors: a 405B model has 1,138
MAX_ITEMS = 1 << 22  # of all arrays: Llama 3 has 128,256 tokens and 280,147 merges
MAX_NAME = 1 << 10  # bytes of a key or a tensor's name; ggml takes 64
MAX_TEXT = 1 << 22  # bytes of a text, such as a chat template
MAX_DEPTH = 3  # arrays in arrays
MAX_ALIGNMENT = 1 << 16
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


class Array(NamedTuple):
    """An array of the metadata, walked over but not unpacked: vocabularies are long, and not everyone wants them."""

    data: mmap.mmap
    kind: int  # of its items
    length: int
    start: int

    def numbers(self) -> tuple[Any, ...]:
        """The items, where they are numbers; else none."""
        return struct.unpack_from(f"<{self.length}{NUMBERS[self.kind]}", self.data, self.start) if self.is_plain else ()

    def texts(self) -> list[bytes]:
        """The items, where they are texts; else none."""
        found, place, data = [], self.start, self.data
        length = struct.Struct("<Q").unpack_from
        for _ in range(self.length if self.kind == TEXT else 0):
            (size,) = length(data, place)
            found.append(data[place + 8 : place + 8 + size])
            place += 8 + size
        return found

    @property
    def is_plain(self) -> bool:
        """Whether the items are numbers."""
        return self.kind in NUMBERS


class StoredTensor(NamedTuple):
    """One row of the table: shape in torch's order, ggml's type, first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def block(self) -> tuple[int, int]:
        """Values that are stored together, and their bytes."""
        if self.kind in PLAIN:
            return 1, PLAIN[self.kind].itemsize
        return BLOCKS[self.kind].values, BLOCKS[self.kind].size

    @property
    def nbytes(self) -> int:
        """What the tensor takes in the file."""
        values, size = self.block
        count = 1
        for axis in self.shape:
            count *= axis
        return count // values * size


@dataclass
class GGUF:
    """A file's header: `metadata` holds numbers, texts (str) and `Array`s by key."""

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def stored(self) -> dict[str, torch.Tensor | Codec]:
        """Every tensor over the mapped file: plain ones, and codecs of those in blocks."""
        storage, found = map_file(self.path), dict[str, torch.Tensor | Codec]()
        for name, (shape, kind, start) in self.tensors.items():
            if kind in PLAIN:
                found[name] = tensor_at(storage, start, shape, PLAIN[kind])
            else:
                codec = BLOCKS[kind]
                bytes_ = (*shape[:-1], shape[-1] // codec.values * codec.size)
                found[name] = codec(tensor_at(storage, start, bytes_, torch.uint8))
        return found


class _Reader:
    """Numbers, texts and arrays from a place in a file on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.place, self.items = path, data, 4, 0

    def number(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self.data, self.place)
        except struct.error:
            raise self.error(
                f"its header ends in the middle, at byte {len(self.data)} (truncated, or damaged)"
            ) from None
        self.place += struct.calcsize("<" + code)
        return value

    def text(self, what: str, limit: int) -> str:
        size, start = self.number("Q"), self.place
        if size > min(limit, len(self.data) - start):
            raise self.error(f"{what} of {size} bytes at byte {start}, where {len(self.data) - start} are left")
        self.place += size
        try:
            return self.data[start : self.place].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} at byte {start} that is no UTF-8") from None

    def value(self, key: str) -> Any:
        kind = self.number("I")
        if kind == TEXT:
            return self.text(f"{key!r:.80}: a text", MAX_TEXT)
        if kind == ARRAY:
            return self.array(key, 1)
        if kind not in NUMBERS:
            raise self.error(f"{key!r:.80} is of type {kind}, which there is not")
        return self.number(NUMBERS[kind])

    def array(self, key: str, depth: int) -> Array:
        """The array that begins here; the place is behind it afterwards."""
        kind, count, start = self.number("I"), self.number("Q"), self.place
        least = struct.calcsize(NUMBERS[kind]) if kind in NUMBERS else {TEXT: 8, ARRAY: 12}.get(kind, 0)
        self.items += count
        if not least or depth > MAX_DEPTH or self.items > MAX_ITEMS or count * least > len(self.data) - start:
            raise self.error(
                f"{key!r:.80} is an array (depth {depth}) of {count} items of type {kind}, at byte {start}"
            )
        if kind == ARRAY:
            for _ in range(count):
                self.array(key, depth + 1)
        elif kind == TEXT:
            self.place = self._behind_texts(key, count)
        else:
            self.place += count * least
        return Array(self.data, kind, count, start)

    def _behind_texts(self, key: str, count: int) -> int:
        data, place, length = self.data, self.place, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                place += 8 + length(data, place)[0]
        except (struct.error, OverflowError):
            place = len(data) + 1
        if place > len(data):
            raise self.error(f"{key!r:.80}: a text reaches beyond the end of the file")
        return place

    def error(self, found: str) -> Exception:
        return format_error(self.path, found, EXPECTED)


def read_gguf(path: Path) -> GGUF:
    """The header of a GGUF file. LlamaError where it is none, another version, or not consistent with its size."""
    head = read_head(path, EXPECTED)
    if not head.startswith(b"GGUF"):
        raise format_error(path, f"the first bytes {head[:4]!r}", EXPECTED)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader, found = _Reader(path, data), GGUF(path)
    version = reader.number("I")
    if version & 0xFFFF == 0:
        raise reader.error("a big-endian file")
    if version not in (2, 3):
        raise reader.error(f"version {version}")
    tensors, keys = reader.number("Q"), reader.number("Q")
    if max(tensors, keys) > MAX_ENTRIES:
        raise reader.error(f"{tensors} tensors and {keys} keys (at most {MAX_ENTRIES})")
    for _ in range(keys):
        key = reader.text("a key", MAX_NAME)
        if key in found.metadata:
            raise reader.error(f"the key {key!r:.80} twice")
        found.metadata[key] = reader.value(key)
    _read_table(reader, found, tensors)
    return found


def _read_table(reader: _Reader, found: GGUF, count: int) -> None:
    """Name, shape, type and place of every tensor; each begins, aligned, where the one before ends."""
    alignment = found.metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.error(f"general.alignment is {alignment!r:.60}, no power of two from 8 to {MAX_ALIGNMENT}")
    for _ in range(count):
        name = reader.text("a tensor's name", MAX_NAME)
        axes = reader.number("I")
        if name in found.tensors or not 1 <= axes <= 4:
            raise reader.error(f"the tensor {name!r:.80} {'twice' if name in found.tensors else f'with {axes} axes'}")
        shape = tuple(reader.number("Q") for _ in range(axes))[::-1]
        found.tensors[name] = _checked(reader, name, StoredTensor(shape, reader.number("I"), reader.number("Q")))
    data, end = -(-reader.place // alignment) * alignment, 0
    for name, tensor in found.tensors.items():
        place = -(-end // alignment) * alignment
        if tensor.start != place:
            raise reader.error(f"{name!r:.80} begins at byte {tensor.start} of the data, not where it must: {place}")
        end = place + tensor.nbytes
        found.tensors[name] = tensor._replace(start=data + place)
    if data + end > len(reader.data) and count:
        raise reader.error(f"{len(reader.data)} bytes, but its tensors take {data + end} (truncated)")


def _checked(reader: _Reader, name: str, tensor: StoredTensor) -> StoredTensor:
    shape, kind, size = tensor.shape, tensor.kind, len(reader.data)
    if kind not in PLAIN and kind not in BLOCKS:
        supported = ", ".join(
            [*(str(dtype).removeprefix("torch.") for dtype in PLAIN.values()), *(c.name for c in BLOCKS.values())]
        )
        found = f"{name!r:.80} is stored as {FOREIGN_TYPES.get(kind, 'an unknown type')} (ggml type {kind})"
        raise format_error(reader.path, found, f"one of {supported}")
    values, _ = tensor.block
    if min(shape) < 1 or max(shape) > 8 * size or shape[-1] % values or tensor.nbytes > size:
        raise reader.error(f"{name!r:.80} is {shape} in blocks of {values}, in a file of {size} bytes")
    return tensor
