"""Files of tensors: mapped, checked before use, and never executed. Nothing in here knows about Llama."""

import ctypes
import json
import math
import mmap
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import LlamaError

SAFETENSORS_DTYPES = {
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
MAX_HEADER = 100_000_000  # bytes of JSON, the limit of the safetensors library


def wrong(path: Path, found: str, expected: str) -> LlamaError:
    """The one form of every complaint about a file: where, what was found, what should be there."""
    return LlamaError(f"{path}: {found}; expected {expected}")


def read_head(path: Path, expected: str) -> bytes:
    """The first 64 bytes of a file that is none of the things a failed download leaves; LlamaError if it is one."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; expected {expected}")
    if not path.is_file():
        raise wrong(path, "not a file", expected)
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise wrong(path, "the file is empty (0 bytes)", expected)
    if head.startswith(b"version https://git-lfs"):
        raise wrong(path, "a Git LFS pointer, not the file it stands for (run `git lfs pull`)", expected)
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise wrong(path, "a web page (HTML), as a failed or refused download leaves it", expected)
    return head


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """A JSON file that holds an object."""
    read_head(path, expected)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"no valid JSON ({error})", expected) from error
    if not isinstance(value, dict):
        raise wrong(path, f"a JSON {type(value).__name__}", f"{expected}, a JSON object")
    return value


# ------------------------------------------------------------------------------------------ mapped memory


def map_file(path: Path) -> torch.UntypedStorage:
    """The file as memory. Pages are read when touched, and private: writing to a tensor leaves the file alone."""
    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def view(storage: torch.UntypedStorage, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor that begins `start` bytes into `storage`: mapped, or a copy where the start is not aligned."""
    stop = start + math.prod(shape) * dtype.itemsize
    own: Any = storage[start:stop]  # a storage of its own: torch.save then writes this tensor, not the whole file
    if start % dtype.itemsize:
        own = own.clone()
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    with torch.device("cpu"):
        return torch.empty(0, dtype=dtype).set_(own, 0, shape, strides)


def _libc_madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):  # no such call on this system: pages then stay until they are needed
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


_MADVISE = _libc_madvise()


def drop_pages(tensor: Tensor) -> None:
    """Give back the memory of a mapped tensor that has been copied; whoever reads it again reads the file again.

    Only for tensors that are mapped, and that nobody has written to: other memory would be lost.
    """
    if _MADVISE is None or tensor.numel() == 0:
        return
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page  # whole pages only: the rest belongs to the neighbours, too
    stop = (tensor.data_ptr() + extent * tensor.itemsize) // page * page
    if stop > start:
        _MADVISE(start, stop - start, getattr(mmap, "MADV_DONTNEED", 4))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else memoryview(b"")


# ------------------------------------------------------------------------------------------------ PyTorch


def read_pth(path: Path) -> tuple[Any, bool]:
    """What `torch.save` wrote, and whether its tensors are mapped (old files that are no zip archive are read).

    No code is run: `weights_only=True`, and no other way is tried. A file that holds more than tensors and plain values
    is refused.
    """
    expected = "a PyTorch file (torch.save)"
    head = read_head(path, expected)
    zipped = head.startswith(b"PK")
    if not zipped and not head.startswith(b"\x80"):
        raise wrong(path, f"it begins with {head[:8]!r}, so it is no PyTorch file", expected)
    if zipped:
        _check_zip(path, expected)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped), zipped
    except Exception as error:  # (the parser meets a damaged file in a dozen exception classes)
        raise wrong(path, _reason(error), f"{expected} of tensors and plain values, whole and unchanged") from error


def _check_zip(path: Path, expected: str) -> None:
    """torch.load trusts the archive's directory and checks no sum: a damaged one would give other weights, silently.

    A compressed entry could unfold to any size. The weights themselves are not read here.
    """
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entries = archive.infolist()
            total = sum(entry.file_size for entry in entries)
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or total > size:
                raise wrong(path, f"entries that unfold to {total} bytes", f"{expected}, which is not compressed")
            for entry in entries:
                _check_zip_entry(file, entry)
                if entry.filename.endswith("data.pkl") and entry.CRC:  # 0: saved without sums
                    archive.read(entry)
    except LlamaError:
        raise
    except Exception as error:  # (zipfile, too, meets a damaged archive in a dozen exception classes)
        raise wrong(path, f"a damaged or truncated archive of {size} bytes ({error})", expected) from error


def _check_zip_entry(file: BinaryIO, entry: zipfile.ZipInfo) -> None:
    """The entry's own header has to say what the directory says, and its data to end where a next header begins."""
    file.seek(entry.header_offset)
    header = file.read(30)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437")
    if header[:4] != b"PK\3\4" or file.read(name_length) != name:
        raise zipfile.BadZipFile(f"{entry.filename!r} is not where the directory says")
    file.seek(entry.header_offset + 30 + name_length + extra_length + entry.file_size)
    if file.read(2) != b"PK":
        raise zipfile.BadZipFile(f"{entry.filename!r} does not end where its size says")


def _reason(error: Exception) -> str:
    """torch's message without its advice to switch the safety off."""
    text = " ".join(str(error).split())
    marker = "WeightsUnpickler error: "
    if marker in text:
        text = text[text.index(marker) + len(marker) :]
    elif "Weights only load failed" in text:
        text = "it holds something else than tensors"
    text = text.split(" was not an allowed global")[0].split(" Please use")[0].split(" Check the documentation")[0]
    return f"not readable as tensors ({type(error).__name__}: {text[:200]})"


# -------------------------------------------------------------------------------------------- safetensors


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], bool]:
    """Every tensor of a safetensors file, and whether all are mapped (a type may be out of alignment).

    The header is checked first: places, sizes, no gap, no overlap.
    """
    expected = "a safetensors file (8 bytes of header length, a JSON header, the tensors)"
    head = read_head(path, expected)
    size = path.stat().st_size
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(size - 8, MAX_HEADER):
        raise wrong(path, f"a header of {length} bytes in a file of {size} (truncated, or another format)", expected)
    with path.open("rb") as file:
        header = file.read(8 + length)[8:]
    try:
        table = json.loads(header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"a header that is no JSON ({error})", expected) from error
    places = _check_header(path, table, size - 8 - length)
    storage, data = map_file(path), 8 + length
    mapped = all((data + start) % dtype.itemsize == 0 for start, _, dtype in places.values())
    return {name: view(storage, data + start, shape, dtype) for name, (start, shape, dtype) in places.items()}, mapped


def _check_header(path: Path, table: Any, size: int) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    """Name to (start, shape, dtype), in the order of the file; `size` is what follows the header, in bytes."""
    if not isinstance(table, dict):
        raise wrong(path, f"a header that is a {type(table).__name__}", "a JSON object")
    places = {}
    for name, entry in table.items():
        if name != "__metadata__":
            places[name] = _check_entry(path, name, entry)
    ordered = dict(sorted(places.items(), key=lambda item: item[1][0]))
    end = 0
    for name, (start, shape, dtype) in ordered.items():
        if start != end:
            raise wrong(path, f"{name!r} begins at byte {start} of the data", f"byte {end}, where the one before ends")
        end = start + math.prod(shape) * dtype.itemsize
    if end != size:
        raise wrong(path, f"{size} bytes of data (truncated, or grown)", f"the {end} bytes that its header describes")
    return ordered


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, tuple[int, ...], torch.dtype]:
    expected = "dtype, shape and data_offsets that fit each other"
    try:
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise wrong(path, f"{name!r} is described by {entry!r:.100}", expected) from error
    if not isinstance(kind, str) or kind not in SAFETENSORS_DTYPES:
        raise wrong(path, f"{name!r} has dtype {kind!r:.40}", f"one of {', '.join(SAFETENSORS_DTYPES)}")
    dtype = SAFETENSORS_DTYPES[kind]
    if not whole or stop - start != math.prod(shape) * dtype.itemsize:
        raise wrong(path, f"{name!r} is {kind} {shape!r:.100} at bytes {start!r:.40} to {stop!r:.40}", expected)
    return start, shape, dtype


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], read: Callable[[str], Tensor]
) -> None:
    """Write tensors one at a time: `read(name)` is called in the order of `tensors`, which gives shapes and types."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in tensors:
            write_tensor(file, read(name))


def write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Append the bytes of a CPU tensor, row after row."""
    whole = tensor.contiguous()  # a name of its own keeps the memory alive while it is written
    file.write(raw_bytes(whole))
