"""The published schedule, and our readable reference: for models with hooks or overrides, which are called just so."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .request import Request, RowState, Step
from .sampler import Sampler, non_finite, score_prompt


def published_steps(model: Any, rows: list[RowState], request: Request, sampler: Sampler) -> Iterator[Step]:
    """The prompts up to the shortest one's length at once, then one position a step for all rows."""
    tokens = torch.zeros((len(rows), max(row.limit for row in rows) + 1), dtype=torch.long)  # (n, s)
    for i, row in enumerate(rows):
        tokens[i, : len(row.prompt)] = torch.tensor(row.prompt)
    previous, current = rows[0].reused, min(len(row.prompt) for row in rows)
    while any(row.unfinished or row.unscored(request) for row in rows):
        logits = model.forward(_on_device(model, tokens[:, previous:current]), previous)  # (n, s, v)
        for row, row_logits in zip(rows, logits, strict=True):
            if current <= len(row.prompt) and row_logits.isnan().any():
                raise non_finite(row, f"in prompt positions {previous} to {current - 1}")
            if row.unscored(request):
                score_prompt(row, row_logits, previous, sampler)
        choosing = [i for i, row in enumerate(rows) if row.unfinished and len(row.tokens) == current]
        if choosing:
            yield from choose(logits[choosing, -1], [rows[i] for i in choosing], request, sampler)
            for i in choosing:
                tokens[i, current] = rows[i].tokens[-1]
        previous, current = current, current + 1


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
    return tokens.to(first.device) if isinstance(first, Tensor) else tokens
