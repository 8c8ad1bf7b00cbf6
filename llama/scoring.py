"""Looking at texts without generating: log-probabilities, hidden states, embeddings."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .engine.overrides import has_overrides
from .errors import LlamaError
from .interrupts import no_grad, remove_hooks, restoring


def score(generate: Callable[..., Any], prompts: list[list[int]], prefill_chunk: int) -> list[dict[str, Any]]:
    """Each prompt's "tokens", "logprobs" (natural, the first 0.0) and their "sum", by a `Llama.generate`."""
    tokens, logprobs = generate(prompts, 0, temperature=0, logprobs=True, echo=True, prefill_chunk=prefill_chunk)
    return [{"tokens": t, "logprobs": p, "sum": sum(p)} for t, p in zip(tokens, logprobs, strict=True)]


def hidden_states(model: Any, prompts: list[list[int]], layers: list[int], prefill_chunk: int) -> Iterator[Tensor]:
    """The states (layers, seqlen, dim) of each prompt after the blocks in `layers`, -1 after the final norm.

    Prompts are fed `max_batch_size` at a time, right-padded, `prefill_chunk` positions at once.
    """
    size = model.params.max_batch_size
    for first in range(0, len(prompts), size):
        yield from _batch_states(model, prompts[first : first + size], layers, prefill_chunk)


@no_grad
def _batch_states(model: Any, prompts: list[list[int]], layers: list[int], prefill_chunk: int) -> list[Tensor]:
    """One batch of `hidden_states`, seen by a hook on each layer that is wanted."""
    forward = model.forward if has_overrides(model) else model.hidden  # an override is part of what is looked at
    chunks: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args, output: chunks[layer].append(output)

    longest = max(map(len, prompts))
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device="cpu")  # (b, s)
    hooks = [(model.norm if layer == -1 else model.layers[layer], keep(layer)) for layer in chunks]

    def feed() -> None:
        for module, hook in hooks:
            module.register_forward_hook(hook)
        for start in range(0, longest, prefill_chunk):
            forward(tokens[:, start : start + prefill_chunk], start)

    restoring(feed, lambda: remove_hooks(hooks))
    states = {layer: torch.cat(parts, dim=1) for layer, parts in chunks.items()}  # each (b, s, d)
    return [
        torch.stack([states[layer][row, : len(prompt)] for layer in layers])
        if layers
        else torch.empty(0, len(prompt), 0)
        for row, prompt in enumerate(prompts)
    ]


def embed(states: list[Tensor], pooling: str, dim: int) -> Tensor:
    """One float32 vector per text (texts, dim), of its final normed states (1, seqlen, dim): their mean or the last."""
    vectors = [state[0].float().mean(0) if pooling == "mean" else state[0, -1].float() for state in states]
    return torch.stack(vectors) if vectors else torch.empty(0, dim)


def check_pooling(pooling: Any) -> None:
    """LlamaError for another pooling than "mean" and "last"."""
    if not isinstance(pooling, str) or pooling not in ("mean", "last"):
        raise LlamaError(f"pooling={pooling!r:.60} must be 'mean' or 'last'")
