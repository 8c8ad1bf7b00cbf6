"""What is gained where prompts begin alike: `python benchmarks/prefixes.py [--shape 110m]`.

Time until each of 50 prompts of 420 tokens, 400 of them in common, has its first token, on 8 rows; and time to score 4
endings of 10 tokens behind 200 in common. Each with and without sharing, in turn, medians of several runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llama import distributed
from llama.cli.bench import SHAPES, random_model
from llama.engine import prefixes, scheduler


@contextmanager
def without_sharing() -> Iterator[None]:
    """Prompts are fed whole."""
    modules: tuple[Any, ...] = (prefixes, scheduler)
    before = prefixes.MIN_SHARED
    for module in modules:
        module.MIN_SHARED = 10**9
    try:
        yield
    finally:
        for module in modules:
            module.MIN_SHARED = before


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="110m", choices=SHAPES)
    parser.add_argument("--trials", type=int, default=3)
    settings = parser.parse_args()
    device = torch.device("cpu")
    groups = distributed.initialize_groups(None, device)
    generator = random_model(settings.shape, device, torch.float32, 448, 8, None, False)
    ids = torch.randint(3, 30000, (8000,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [ids[:400] + ids[1000 + 20 * i : 1020 + 20 * i] for i in range(50)]
    endings = [ids[:200] + ids[5000 + 10 * i : 5010 + 10 * i] for i in range(4)]
    works: dict[str, Callable[[], object]] = {
        "50 prompts, first tokens": lambda: generator.generate(prompts, 1, temperature=0),
        "4 endings, score": lambda: generator.score(endings),
    }
    for name, work in works.items():
        shared, whole = [], []
        for _ in range(settings.trials):
            shared.append(seconds(work))
            with without_sharing():
                whole.append(seconds(work))
        ratio = statistics.median(whole) / statistics.median(shared)
        times = f"{statistics.median(shared):.2f} s shared, {statistics.median(whole):.2f} s whole"
        print(f"{settings.shape} {name}: {times}, {ratio:.1f} x")
    groups.close()


if __name__ == "__main__":
    main()
