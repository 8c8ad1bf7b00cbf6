"""Which device and dtype a rank computes with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import environment_integer
from ..errors import LlamaError


def pick_device(device: str | torch.device | None) -> torch.device:
    """CUDA if there is one, else the CPU; ``cuda`` without an index is the GPU numbered LOCAL_RANK. LlamaError for a
    device that is not there.
    """
    try:
        chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):  # torch's message lists two dozen
        raise LlamaError(f"device={device!r} is none that torch knows: take 'cpu', 'cuda', 'cuda:N' or 'mps'") from None
    if chosen.type == "meta":
        raise LlamaError("device='meta' holds no values: take 'cpu', 'cuda', 'cuda:N' or 'mps'")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise LlamaError(f"device={str(device)!r} was asked for, but torch sees no Apple GPU; use device='cpu'")
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise LlamaError(f"device={str(device)!r} was asked for, but torch sees no CUDA GPU; use device='cpu'")
    index = environment_integer("LOCAL_RANK", "0") if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise LlamaError(
            f"this machine's ranks need GPU number {index}, but it has {torch.cuda.device_count()} GPU(s): start "
            f"at most {torch.cuda.device_count()} rank(s) here (torchrun --nproc_per_node {torch.cuda.device_count()})"
        )
    return torch.device("cuda", index)


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """float32 on a CPU; on a GPU bfloat16 where it computes in that (T4 and V100 only emulate it), else float16."""
    if dtype is None:
        if device.type == "cuda":
            with torch.cuda.device(device):  # the question is about the current device
                native = torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.bfloat16 if native else torch.float16
        return torch.float16 if device.type == "mps" else torch.float32
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or chosen not in (torch.float32, torch.bfloat16, torch.float16):
        raise LlamaError(f"dtype={dtype!r} must be one of float32, bfloat16, float16 or None")
    return chosen


def send(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Integers (lists, or a tensor on the CPU) as a tensor (long) on the device. Where that is CUDA the CPU does not
    wait for the copy.
    """
    host = torch.as_tensor(values, dtype=torch.long, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
