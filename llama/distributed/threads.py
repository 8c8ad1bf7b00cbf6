"""How many threads a program of ours takes on a CPU."""

import os
from pathlib import Path

import torch
from torch import nn

from .layers import linear_layers

SMALL = 1 << 17  # weights; a product with so few takes microseconds, less than it takes to wake a second thread
CGROUPS = Path("/sys/fs/cgroup")  # where Linux mounts control groups, version 2


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
