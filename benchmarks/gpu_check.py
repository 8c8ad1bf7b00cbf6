"""The demo model on another device against the CPU in float32: python benchmarks/gpu_check.py --device cuda

Logits of one prompt must be near (by dtype and scheme), and in float32 the greedy tokens of uneven prompts the same.
"""

import argparse
import sys
from pathlib import Path

import torch

from llama import Llama

DEMO = str(Path(__file__).resolve().parent.parent / "checkpoints" / "demo")
# dtype, quantize, compile: largest difference of a logit, as a share of the largest logit
CASES: list[tuple[str, str | None, bool, float]] = [
    ("float32", None, False, 1e-4),
    ("float32", None, True, 1e-4),
    ("bfloat16", None, False, 0.05),
    ("bfloat16", None, True, 0.05),
    ("float16", None, False, 0.01),
    ("float16", None, True, 0.01),
    ("bfloat16", "int8", False, 0.08),
    ("bfloat16", "int8", True, 0.08),
    ("bfloat16", "int4", False, 0.5),
    ("bfloat16", "int4", True, 0.5),
]


def decoded(generator: Llama, prompts: list[list[int]], steps: list[list[int]]) -> torch.Tensor:
    """Float32 logits (steps, rows, v) as decoding gives them for the same tokens, compiled if it is."""
    longest = max(map(len, prompts))
    generator.model.forward(torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts]), 0)
    found = []  # padding in the cache is hidden from the shorter rows, and overwritten as they grow
    for number, tokens in enumerate(steps):
        positions = [len(prompt) + number for prompt in prompts]
        if generator.decoder is not None:
            logits = generator.decoder(tokens, positions)
        else:
            logits = generator.model.forward(torch.tensor(tokens)[:, None], torch.tensor(positions))[:, -1]
        found.append(logits.float().cpu().clone())
    return torch.stack(found)


def main() -> None:
    """Exit status 1 if any case is out of its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    build = {"ckpt_dir": DEMO, "tokenizer_path": None, "max_seq_len": 128, "max_batch_size": 4}
    bad = 0
    with Llama.build(**build, device="cpu", dtype="float32") as reference:
        prompts = [
            reference.tokenizer.encode(text, bos=True, eos=False)
            for text in ("Once upon a time", "Lily", "One day, Tom")
        ]
        wanted = reference.generate(prompts, 40, temperature=0)[0]
        steps = [[tokens[i] for tokens in wanted] for i in range(16)]
        expected = decoded(reference, prompts, steps)
        for dtype, quantize, compile, bound in CASES:
            with Llama.build(**build, device=device, dtype=dtype, quantize=quantize, compile=compile) as generator:
                found = decoded(generator, prompts, steps)
                off = float((found - expected).abs().max() / expected.abs().max())
                same = generator.generate(prompts, 40, temperature=0)[0] == wanted
            good = off <= bound and (same or dtype != "float32")
            bad += not good
            name = f"{dtype}{' ' + quantize if quantize else ''}{' compiled' if compile else ''}"
            print(f"{'ok ' if good else 'BAD'} {name:<24} logits off by {off:.2e} (at most {bound:.0e}), ", end="")
            print(f"greedy tokens {'equal' if same else 'differ'}", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
