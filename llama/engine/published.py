"""The published schedule, and our readable reference: for models with hooks or overrides, which are called just so."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..distributed import send
from .request import Request, RowState, Step
from .sampler import PromptScores, Sampler, non_finite


def published_steps(model: Any, rows: list[RowState], request: Request, sampler: Sampler) -> Iterator[Step]:
    """The prompts up to the shortest one's length at once, then one position a step for all rows."""
    tokens = torch.zeros((len(rows), max(row.limit for row in rows) + 1), dtype=torch.long)  # (n, s)
    for i, row in enumerate(rows):
        tokens[i, : len(row.prompt)] = torch.tensor(row.prompt)
    previous, current = rows[0].reused, min(len(row.prompt) for row in rows)
    while any(row.unfinished or row.unscored(request) for row in rows):
        fed = _on_device(model, tokens[:, previous : current + 1])  # (n, s + 1), the last column for scores
        logits = model.forward(fed[:, :-1], previous)  # (n, s, v)
        _check_finite(rows, logits, previous)
        scores = PromptScores(sampler)
        for row, row_logits, following in zip(rows, logits, fed[:, 1:], strict=True):
            if row.unscored(request):
                scores.add(row, previous, row_logits, following)
        scores.read()
        choosing = [i for i, row in enumerate(rows) if row.unfinished and len(row.tokens) == current]
        if choosing:
            last = logits[:, -1]  # (n, v)
            if len(choosing) < len(rows):
                last = torch.stack([last[i] for i in choosing])  # views by number: a GPU would wait for a list of them
            yield from choose(last, [rows[i] for i in choosing], request, sampler)
            for i in choosing:
                tokens[i, current] = rows[i].tokens[-1]
        previous, current = current, current + 1


def _check_finite(rows: list[RowState], logits: Tensor, start: int) -> None:
    """LlamaError naming the row where logits (n, s, v) of positions `start` .., all of its prompt, hold NaN."""
    end = start + logits.shape[1]
    checked = [(row, part) for row, part in zip(rows, logits, strict=True) if end <= len(row.prompt)]
    bad = torch.stack([part.isnan().any() for _, part in checked]).tolist() if checked else []  # looked at once
    if any(bad):
        raise non_finite(checked[bad.index(True)][0], f"in prompt positions {start} to {end - 1}")


def choose(logits: Tensor, rows: list[RowState], request: Request, sampler: Sampler) -> Iterator[Step]:
    """Give each row its next token, from its logits (n, v)."""
    samples = sampler.sample(logits, rows, request.logprobs)
    for i, (row, token) in enumerate(zip(rows, samples.tokens, strict=True)):
        logprob = None if samples.logprobs is None else samples.logprobs[i]
        if logprob is not None:
            row.logprobs.append(logprob)
        if samples.top_logprobs is not None:
            row.top_logprobs.append(samples.top_logprobs[i])
        yield Step(row.index, token, logprob, row.advance(token, request))


def _on_device(model: Any, tokens: Tensor) -> Tensor:
    """The ids where the model's weights are; a stub without weights gets them on the CPU."""
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return send(tokens, first.device) if isinstance(first, Tensor) else tokens
