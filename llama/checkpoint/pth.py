"""PyTorch's files (`torch.save`): checked before use, mapped, and never executed. Nothing in here knows about Llama.

torch's own reader never sees a file: it trusts sizes and offsets, and where two readers take one file differently, what
one has checked is not what the other loads.
"""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..errors import LlamaError
from .files import format_error, one_version, read_head
from .mapping import map_file
from .pickle_scan import MAX_BYTES, PickleProblem, Reader, StorageRecord, TensorRecord

EXPECTED = "a PyTorch file (torch.save)"
MAGIC = 0x1950A86A20F9469CFC6C  # of files before PyTorch 1.6, which are no zip archives
SEVERAL_PARTS = "one of an archive's several parts"
MAX_ENTRIES = 50_000


class Extent(NamedTuple):
    """Where a storage lies in the file, in bytes."""

    start: int
    size: int


def read_pth(path: Path) -> tuple[Any, bool]:
    """What `torch.save` wrote, and whether its tensors are mapped (old files that are no zip archive are read).

    No code is run, whatever the file holds. LlamaError for a file that holds more than tensors and plain values.
    """
    head = read_head(path, EXPECTED)
    zipped = head.startswith(b"PK")
    if not zipped and not head.startswith(b"\x80"):
        raise format_error(path, f"it begins with {head[:8]!r}, so it is no PyTorch file", EXPECTED)
    try:
        with one_version(path):
            with path.open("rb") as file:
                value, extents = _read_zip(path, file) if zipped else _read_old(file, path.stat().st_size)
            return _Tensors(path, extents, zipped).made(value)
    except LlamaError:
        raise
    except PickleProblem as error:
        whole = f"{EXPECTED} of tensors and plain values, whole and unchanged"
        raise format_error(path, f"not readable as tensors ({error})", whole) from error
    except Exception as error:  # (zipfile and struct meet a damaged file in a dozen exception classes)
        found = f"a damaged or truncated {'archive' if zipped else 'file'} of {path.stat().st_size} bytes"
        raise format_error(path, f"{found} ({error!s:.200})", EXPECTED) from error


class _Tensors:
    """Makes the tensors that a pickle describes, over the file's pages."""

    def __init__(self, path: Path, extents: dict[str, Extent], zipped: bool) -> None:
        self._file, self._extents, self._mapped = map_file(path), extents, zipped
        self._storages: dict[str, tuple[StorageRecord, Any]] = {}
        self._tensors: dict[int, Tensor] = {}  # by the record's id: one tensor may stand in many places

    def made(self, value: Any) -> tuple[Any, bool]:
        """`value` with tensors where they were described, and whether all of them are mapped."""
        return self._value(value), self._mapped

    def _value(self, value: Any) -> Any:
        if isinstance(value, TensorRecord):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = self._tensor(value)
            return self._tensors[id(value)]
        if isinstance(value, dict):
            return {key: self._value(item) for key, item in value.items()}
        return type(value)(map(self._value, value)) if type(value) in (list, tuple) else value

    def _tensor(self, record: TensorRecord) -> Tensor:
        storage = self._storage(record.storage, record.dtype.itemsize)
        with torch.device("cpu"):
            empty = torch.empty(0, dtype=record.dtype)
        return empty.set_(storage, record.offset, record.shape, record.strides)

    def _storage(self, record: StorageRecord, unit: int) -> Any:
        extent = self._extents.get(record.key)
        if extent is None or extent.size != record.size:
            held = "is missing" if extent is None else f"has {extent.size} bytes"
            raise PickleProblem(f"the record of storage {record.key!r:.40} {held}, its tensors need {record.size}")
        if record.key not in self._storages:
            storage: Any = self._file[extent.start : extent.start + extent.size]
            if extent.start % unit or not self._mapped:
                storage, self._mapped = storage.clone(), False
            self._storages[record.key] = record, storage
        first, storage = self._storages[record.key]
        if first != record:
            raise PickleProblem(f"storage {record.key!r:.40} in two types or sizes")
        return storage


# ------------------------------------------------------------------------------------------- zip archives


def _read_zip(path: Path, file: BinaryIO) -> tuple[Any, dict[str, Extent]]:
    """The pickle's value and the place of each storage. Sums of weights are not compared: that would read them all."""
    size = path.stat().st_size
    _check_end(file, size)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        total = sum(entry.file_size for entry in entries)
        stored = all(entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1 for entry in entries)
        if not stored or total > size:
            raise format_error(path, f"entries that unfold to {total} bytes", f"{EXPECTED}, which is not compressed")
        extents = _extents(file, entries)
        folder = entries[0].filename.split("/")[0] if entries else ""
        order = extents.get(f"{folder}/byteorder")
        if order is not None and (order.size != 6 or archive.read(f"{folder}/byteorder") != b"little"):
            raise format_error(
                path, "numbers in another byte order (big-endian)", "a file saved on a little-endian CPU"
            )
        if f"{folder}/data.pkl" not in extents or extents[f"{folder}/data.pkl"].size > MAX_BYTES:
            raise PickleProblem(f"no data.pkl of at most {MAX_BYTES} bytes")
        entry = archive.getinfo(f"{folder}/data.pkl")
        if not entry.CRC:  # saved without sums
            entry.CRC = None  # type: ignore[assignment]
        data = archive.read(entry)
    start = f"{folder}/data/"
    return Reader(io.BytesIO(data)).read(), {
        name.removeprefix(start): extent for name, extent in extents.items() if name.startswith(start)
    }


def _check_end(file: BinaryIO, size: int) -> None:
    """The archive's last record ends the file, and the directory lies right before it: no second, hidden one."""
    file.seek(max(0, size - 98))
    tail = file.read(98)
    end = struct.unpack("<4s4H2LH", tail[-22:])
    if end[0] != b"PK\5\6" or end[7]:
        raise zipfile.BadZipFile("it does not end with the end of its directory")
    parts = [end[1], end[2], end[4] - end[3]]
    before, length, start, count = size - 22, *end[5:7], end[4]
    if tail[-42:-38] == b"PK\6\7":
        disk, at, disks = struct.unpack("<LQL", tail[-38:-22])
        record = struct.unpack("<4sQ2H2L4Q", tail[-98:-42]) if len(tail) == 98 else (b"",)
        if at != size - 98 or record[0] != b"PK\6\6" or record[1] != 44:
            raise zipfile.BadZipFile("its zip64 records do not follow each other")
        parts += [disk, max(disks, 1) - 1, record[4], record[5], record[7] - record[6]]
        before, length, start, count = size - 98, *record[8:10], record[7]
    if any(parts):
        raise zipfile.BadZipFile(SEVERAL_PARTS)
    if start + length != before or count > MAX_ENTRIES:
        raise zipfile.BadZipFile(f"its directory of {count} entries does not end where it says")


def _extents(file: BinaryIO, entries: list[zipfile.ZipInfo]) -> dict[str, Extent]:
    """Where each entry's data lies; each begins behind the one before, and no name comes twice."""
    extents: dict[str, Extent] = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        start = _check_entry(file, entry)
        if entry.volume:
            raise zipfile.BadZipFile(SEVERAL_PARTS)
        if entry.filename in extents or entry.header_offset < end:
            raise zipfile.BadZipFile(f"{entry.filename!r:.80} comes twice or overlaps the one before")
        extents[entry.filename], end = Extent(start, entry.file_size), start + entry.file_size
    return extents


def _check_entry(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """First byte of the data. The entry's header has to say what the directory says, and its data to end at a next."""
    file.seek(entry.header_offset)
    header = file.read(30)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437")
    if header[:4] != b"PK\3\4" or file.read(name_length) != name:
        raise zipfile.BadZipFile(f"{entry.filename!r:.80} is not where the directory says")
    if entry.is_dir() or entry.external_attr & 0x10:  # torch would leave its tensor as the heap was
        raise zipfile.BadZipFile(f"{entry.filename!r:.80} is a folder")
    start: int = entry.header_offset + 30 + name_length + extra_length
    file.seek(start + entry.file_size)
    if file.read(2) != b"PK":
        raise zipfile.BadZipFile(f"{entry.filename!r:.80} does not end where its size says")
    return start


# ----------------------------------------------------------------------------- files before PyTorch 1.6


def _read_old(file: BinaryIO, size: int) -> tuple[Any, dict[str, Extent]]:
    """Five pickles (magic number, version, system, value, keys of storages), then each storage behind its length."""
    magic, version, system, value, keys = (Reader(file).read() for _ in range(5))
    if magic != MAGIC or version != 1001 or not isinstance(system, dict) or not isinstance(keys, list):
        raise PickleProblem("it begins otherwise than an old file of torch.save")
    if system.get("little_endian") is not True:
        raise PickleProblem("numbers in another byte order (big-endian)")
    units = {record.key: record.dtype.itemsize if record.dtype else 1 for record in _storages(value, {}).values()}
    extents: dict[str, Extent] = {}
    for key in keys:
        if type(key) is not str or key in extents or key not in units:
            raise PickleProblem("a list of storages that does not fit the tensors")
        count = int.from_bytes(file.read(8), "little")
        extents[key] = Extent(file.tell(), count * units[key])
        if sum(extents[key]) > size:
            raise PickleProblem(f"storage {key!r:.40} ends behind the file's {size} bytes")
        file.seek(sum(extents[key]))
    if file.tell() != size:
        raise PickleProblem(f"{size - file.tell()} bytes behind its last storage")
    return value, extents


def _storages(value: Any, found: dict[int, StorageRecord]) -> dict[int, StorageRecord]:
    """Every storage within a value (of bounded depth and size)."""
    if isinstance(value, TensorRecord):
        found[id(value.storage)] = value.storage
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _storages(item, found)
    return found
