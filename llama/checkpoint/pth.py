"""PyTorch's files (`torch.save`): checked before use, mapped, and never executed. Nothing in here knows about Llama."""

import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import LlamaError
from .files import format_error, read_head


def read_pth(path: Path) -> tuple[Any, bool]:
    """What `torch.save` wrote, and whether its tensors are mapped (old files that are no zip archive are read).

    No code is run: `weights_only=True`, and no other way is tried. A file that holds more than tensors and plain values
    is refused.
    """
    expected = "a PyTorch file (torch.save)"
    head = read_head(path, expected)
    zipped = head.startswith(b"PK")
    if not zipped and not head.startswith(b"\x80"):
        raise format_error(path, f"it begins with {head[:8]!r}, so it is no PyTorch file", expected)
    if zipped:
        _check_zip(path, expected)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped), zipped
    except Exception as error:  # (the parser meets a damaged file in a dozen exception classes)
        whole = f"{expected} of tensors and plain values, whole and unchanged"
        raise format_error(path, _reason(error), whole) from error


def _check_zip(path: Path, expected: str) -> None:
    """torch.load trusts the archive's directory and verifies no checksum: a damaged one would give other weights.

    A compressed member could unfold to any size. The weights themselves are not read here.
    """
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if any(member.compress_type != zipfile.ZIP_STORED for member in members) or total > size:
                found = f"members that unfold to {total} bytes"
                raise format_error(path, found, f"{expected}, which is not compressed")
            for member in members:
                _check_zip_member(file, member)
                if member.filename.endswith("data.pkl") and member.CRC:  # 0: saved without sums
                    archive.read(member)
    except LlamaError:
        raise
    except Exception as error:  # (zipfile, too, meets a damaged archive in a dozen exception classes)
        raise format_error(path, f"a damaged or truncated archive of {size} bytes ({error})", expected) from error


def _check_zip_member(file: BinaryIO, member: zipfile.ZipInfo) -> None:
    """The member's own header has to say what the directory says, and its data to end where a next header begins."""
    file.seek(member.header_offset)
    header = file.read(30)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    name = member.orig_filename.encode("utf-8" if member.flag_bits & 0x800 else "cp437")
    if header[:4] != b"PK\3\4" or file.read(name_length) != name:
        raise zipfile.BadZipFile(f"{member.filename!r} is not where the directory says")
    file.seek(member.header_offset + 30 + name_length + extra_length + member.file_size)
    if file.read(2) != b"PK":
        raise zipfile.BadZipFile(f"{member.filename!r} does not end where its size says")


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
