"""Which device and dtype a rank computes with, and how many threads a program of ours takes."""

import os
from pathlib import Path

import torch
from torch import nn

from ..errors import LlamaError
from .layers import linear_layers

SMALL = 1 << 17  # weights; a product with so few takes microseconds, less than it takes to wake a second thread
CGROUPS = Path("/sys/fs/cgroup")  # where Linux mounts control groups, version 2


def pick_device(device: str | torch.device | None) -> torch.device:
    """CUDA if there is one, else the CPU; ``cuda`` without an index is the GPU numbered LOCAL_RANK. LlamaError for a
    device that is not there.
    """
    try:
        chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):  # torch's message lists two dozen
        raise LlamaError(f"device={device!r} is none that torch knows: take 'cpu', 'cuda', 'cuda:N' or 'mps'") from None
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise LlamaError(f"device={str(device)!r} was asked for, but torch sees no Apple GPU; use device='cpu'")
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise LlamaError(f"device={str(device)!r} was asked for, but torch sees no CUDA GPU; use device='cpu'")
    index = int(os.environ.get("LOCAL_RANK", "0")) if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise LlamaError(
            f"this machine's ranks need GPU number {index}, but it has {torch.cuda.device_count()} GPU(s): start "
            f"at most {torch.cuda.device_count()} rank(s) here (torchrun --nproc_per_node {torch.cuda.device_count()})"
        )
    return torch.device("cuda", index)


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """float32 on a CPU; on a GPU bfloat16 where it has that, else float16."""
    if dtype is None:
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        return torch.float16 if device.type == "mps" else torch.float32
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float32, torch.bfloat16, torch.float16):
        raise LlamaError(f"dtype={dtype!r} must be one of float32, bfloat16, float16 or None")
    return chosen


def choose_threads(model: nn.Module | None = None) -> int:
    """For a program's start: torch's threads, at most the cores that this process may use, one if all of the model's
    matrices are small. OMP_NUM_THREADS and MKL_NUM_THREADS win. Returns the number. The library itself never calls it.
    """
    if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    threads = min(torch.get_num_threads(), usable_cores())
    if model is not None:
        layers = [layer for _, layer in linear_layers(model)]
        shapes = [(layer.weight if layer.packed is None else layer.packed).shape for layer in layers]
        if all(rows * columns <= SMALL for rows, columns in shapes):
            threads = 1
    torch.set_num_threads(threads)
    return threads


def usable_cores() -> int:
    """Cores by this process's affinity and the quota of its control group (a container's `--cpus`), at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *_quotas()])))


def _quotas() -> list[float]:
    """Cores that cpu.max ("150000 100000": 1.5) allows this process's control group and those above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    except OSError:  # not Linux
        return []
    found = []
    for group in (Path(own), *Path(own).parents):
        try:
            quota, period = (CGROUPS / group / "cpu.max").read_text(encoding="ascii").split()
            found.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no limit
            continue
    return found
