"""Files mapped into memory: tensors over their bytes, and pages given back after use."""

import ctypes
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor


def map_file(path: Path) -> torch.UntypedStorage:
    """The file as memory. Pages are read when touched, and private: writing to a tensor leaves the file alone."""
    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def tensor_at(storage: torch.UntypedStorage, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
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
    start = -(-tensor.data_ptr() // page) * page  # whole pages only: the neighbors share the others
    stop = (tensor.data_ptr() + extent * tensor.itemsize) // page * page
    if stop > start:
        _MADVISE(start, stop - start, getattr(mmap, "MADV_DONTNEED", 4))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else memoryview(b"")


def write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Append the bytes of a CPU tensor, row after row."""
    contiguous = tensor.contiguous()  # a name of its own keeps the memory alive while it is written
    file.write(raw_bytes(contiguous))
