"""Run on every rank by tests/test_cuda.py: pretend nccl on pretend devices, with the current device looked at."""

import os
import sys
from typing import Any

import torch
from helpers import GOLDEN, build_golden
from simcuda import Pretend

from llama import LlamaError

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def check(cuda: Pretend, wanted: Any, index: int, **changes: Any) -> None:
    """The published text, on this device, which is current until close; a fault on one rank reaches all."""
    prompts = torch.load(GOLDEN / "golden.pt", weights_only=True)["prompts"]
    before = torch.cuda.current_device()
    with build_golden(**{"timeout": 60, "device": None, "backend": None, **changes}) as generator:
        assert generator.device.index == torch.cuda.current_device() == index
        for _ in range(2):
            assert [row[:4] for row in generator.generate(prompts, 4, temperature=0)[0]] == wanted
            generator.generate(prompts, 3, seed=1, logprobs=True)
            generator.model.norm.register_forward_hook(lambda *args: None)  # the published schedule
    assert torch.cuda.current_device() == before


def main() -> None:
    wanted = [row[:4] for row in torch.load(GOLDEN / "golden.pt", weights_only=True)["greedy"]]
    with Pretend(count=WORLD) as cuda:
        check(cuda, wanted, RANK)
        assert cuda.ops["all_gather_object"] and cuda.ops["all_reduce"] and cuda.ops["broadcast"]
        check(cuda, wanted, RANK, compile=True)
        check(cuda, wanted, WORLD - 1 - RANK, device=f"cuda:{WORLD - 1 - RANK}")
        check(cuda, wanted, RANK, model_parallel_size=WORLD // 2)
        os.environ["LOCAL_RANK"] = str((RANK + 1) % WORLD)  # as on a second host
        check(cuda, wanted, (RANK + 1) % WORLD)
        try:
            build_golden(device=None, backend=None, ckpt_dir="/nowhere" if RANK else str(GOLDEN), timeout=60)
        except (LlamaError, FileNotFoundError) as error:
            assert "nowhere" in str(error)
        else:
            raise AssertionError("a rank without its file ends all")
    print(f"rank {RANK}: all checks passed", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
