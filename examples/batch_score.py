"""The perplexity of every line of a file, and of the file as a whole.

    python examples/batch_score.py README.md

`Llama.score` gives a log-probability to each token but the first (BOS, which nothing predicts). A line's perplexity is
exp(-mean): 1 where every token was certain, vocab_size for an even guess, more where the model was sure
of something else. Lines are scored side by side, `max_batch_size` at a time; under `torchrun` the first rank prints.
"""

import math
from pathlib import Path

import fire

from llama import Llama


def perplexity(logprobs: list[float]) -> float:
    """exp of minus the mean of log-probabilities (natural logarithms); nan where there are none."""
    return math.exp(-sum(logprobs) / len(logprobs)) if logprobs else math.nan


def main(
    path: str,
    ckpt_dir: str = "checkpoints/demo",
    tokenizer_path: str | None = None,
    max_seq_len: int = 256,
    max_batch_size: int = 8,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Print perplexity, tokens and text of each line of PATH that is not blank; last, of all of them.

    A line of more than `max_seq_len` tokens is an error that names its place among them.
    """
    text = Path(path).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    with Llama.build(ckpt_dir, tokenizer_path, max_seq_len, max_batch_size, device=device, dtype=dtype) as generator:
        scores = [score["logprobs"][1:] for score in generator.score(lines)]
        for line, logprobs in zip(lines, scores, strict=True):
            print(f"{perplexity(logprobs):10.2f} {len(logprobs):5} {line}")
        whole = [value for logprobs in scores for value in logprobs]
        print(f"{perplexity(whole):10.2f} {len(whole):5} (all {len(lines)} lines)")


if __name__ == "__main__":
    fire.Fire(main)
