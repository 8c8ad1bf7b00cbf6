"""safetensors files: the header is checked before the tensors are mapped. Nothing in here knows about Llama."""

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import MAX_JSON, format_error, one_version, parse_json, read_head
from .mapping import map_file, tensor_at, write_tensor
from .refusals import EXPECTED

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_DIMENSIONS = 8
MAX_NUMBER = (1 << 63) - 1


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], bool]:
    """Every tensor of a safetensors file, and whether all are mapped (a type may be out of alignment).

    The header is checked first: positions, sizes, no gap, no overlap.
    """
    expected = "a safetensors file (8 bytes of header length, a JSON header, the tensors)"
    with one_version(path):
        return _read(path, expected)


def _read(path: Path, expected: str) -> tuple[dict[str, Tensor], bool]:
    head = read_head(path, expected)
    size = path.stat().st_size
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(size - 8, MAX_JSON):
        found = f"a header of {length} bytes in a file of {size} (truncated, or another format)"
        raise format_error(path, found, expected)
    with path.open("rb") as file:
        header = file.read(8 + length)[8:]
    try:
        table = parse_json(header)
    except ValueError as error:
        raise format_error(path, f"a header that is no JSON ({error})", expected) from error
    extents = _check_header(path, table, size - 8 - length)
    storage, data = map_file(path), 8 + length
    mapped = all((data + start) % dtype.itemsize == 0 for start, _, dtype in extents.values())
    tensors = {name: tensor_at(storage, data + at, shape, dtype) for name, (at, shape, dtype) in extents.items()}
    return tensors, mapped


def _check_header(path: Path, table: Any, size: int) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    """Name to (start, shape, dtype), in the order of the file; `size` is what follows the header, in bytes."""
    if not isinstance(table, dict):
        raise format_error(path, f"a header that is a {type(table).__name__}", "a JSON object")
    extents = {name: _check_tensor(path, name, table[name]) for name in table if name != "__metadata__"}
    ordered = dict(sorted(extents.items(), key=lambda item: item[1][0]))
    end = 0
    for name, (start, shape, dtype) in ordered.items():
        if start != end:
            found = f"{name!r} begins at byte {start} of the data"
            raise format_error(path, found, f"byte {end}, where the one before ends")
        end = start + math.prod(shape) * dtype.itemsize
    if end != size:
        raise format_error(path, f"{size} bytes of data (truncated, or grown)", f"the {end} bytes of its header")
    return ordered


def _check_tensor(path: Path, name: str, described: Any) -> tuple[int, tuple[int, ...], torch.dtype]:
    expected = "dtype, shape and data_offsets that fit each other"
    try:
        kind, shape, (start, stop) = described["dtype"], tuple(described["shape"]), described["data_offsets"]
        integers = all(type(number) is int and 0 <= number <= MAX_NUMBER for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise format_error(path, f"{name!r} is described by {described!r:.100}", expected) from error
    if isinstance(kind, str) and re.match(r"F[468]_", kind):
        raise format_error(path, f"{name!r:.120} is {kind:.40}, so the weights are quantized (FP{kind[1]})", EXPECTED)
    if not isinstance(kind, str) or kind not in DTYPES:
        raise format_error(path, f"{name!r} has dtype {kind!r:.40}", f"one of {', '.join(DTYPES)}")
    dtype = DTYPES[kind]
    if not integers or len(shape) > MAX_DIMENSIONS or stop - start != math.prod(shape) * dtype.itemsize:
        raise format_error(path, f"{name!r} is {kind} {shape!r:.100} at bytes {start!r:.40} to {stop!r:.40}", expected)
    return start, shape, dtype


def write_safetensors(
    path: Path, described: Mapping[str, tuple[tuple[int, ...], torch.dtype]], tensors: Iterable[Tensor]
) -> None:
    """Write tensors one at a time, as the iterable makes them; shapes and types are `described` before, by name."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in described.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors:
            write_tensor(file, tensor)
