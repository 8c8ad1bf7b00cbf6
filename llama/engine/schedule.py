"""The one iterator of steps that `generate` and every kind of streaming consume.

There are two schedules. `Decoding._batched` is ours: prompts of unequal length are prefilled together, each row goes on
at its own position, a row that finishes makes room for the next prompt. `Decoding._published` is the published one,
and our readable reference: a model whose forward is not ours, or that somebody watches, is called just so.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import distributed as parallel
from .. import model as architecture
from ..errors import LlamaError
from ..model import Transformer
from .sampling import (
    History,
    Sampling,
    add_bias,
    distribution,
    penalise,
    row_generator,
    sample_at,
    sample_in_slots,
)


class Step(NamedTuple):
    """One token of one prompt. `finish_reason` is "stop" or "length" on a row's last step, else None.

    A stop token is handed out as the last step's token. `logprob` is None unless it was asked for.
    """

    prompt: int
    token: int
    logprob: float | None
    finish_reason: str | None


class StopText(Protocol):
    """Watches one row's text for a stop string."""

    def seen(self, token: int) -> bool:
        """Take the row's next token; whether the stop string is complete."""
        ...


@dataclass(frozen=True)
class Request:
    """What one call asks for, beside its prompts."""

    max_gen_len: int
    sampling: Sampling
    stop_ids: frozenset[int]
    logprobs: bool = False
    score_prompt: bool = False  # log-probabilities of the prompt's tokens too
    prefill_chunk: int = 512  # positions a row is prefilled with at once
    stop_text: Callable[[], StopText] | None = None


@dataclass
class RowState:
    """One prompt on its way: its tokens so far, and what is known of them."""

    index: int
    prompt: list[int]
    limit: int  # tokens at most, the prompt's among them
    tokens: list[int] = field(default_factory=list)  # of the prompt and the output
    prompt_logprobs: list[float] = field(default_factory=lambda: [0.0])
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    generator: torch.Generator | None = None
    history: History | None = None
    stop_text: StopText | None = None

    @property
    def output(self) -> list[int]:
        """The ids behind the prompt; the last may be a stop token."""
        return self.tokens[len(self.prompt) :]

    @property
    def has_room(self) -> bool:
        """Whether another token is to come."""
        return self.finish_reason is None and len(self.tokens) < self.limit

    def unscored(self, request: Request) -> bool:
        """Whether some of the prompt's log-probabilities are wanted and not there yet."""
        return request.score_prompt and len(self.prompt_logprobs) < len(self.prompt)


# -------------------------------------------------------------------------------- is it our model?

_OURS: dict[type, Any] = {
    cls: cls.forward
    for cls in (
        Transformer,
        architecture.TransformerBlock,
        architecture.Attention,
        architecture.FeedForward,
        architecture.RMSNorm,
        parallel.ColumnParallelLinear,
        parallel.RowParallelLinear,
        parallel.ParallelEmbedding,
        nn.ModuleList,
    )
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks_or_overrides(model: Any) -> bool:
    """Whether any forward is not ours (a stub, a subclass, a patched method) or any hook would notice a difference."""
    if type(model) is not Transformer or nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    for module in model.modules():
        cls = type(module)
        if cls not in _OURS or cls.forward is not _OURS[cls] or "forward" in vars(module):
            return True
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return True
    return False


# ------------------------------------------------------------------------------ rows of the cache


@contextlib.contextmanager
def cache_rows(model: Transformer, first: int) -> Iterator[None]:
    """Within, the model's cache begins at row `first`: new prompts are prefilled beside rows that are decoding."""
    attentions = model.attentions()
    for attention in attentions:
        attention.match_cache(model.tok_embeddings.weight)
    whole = [(attention.cache_k, attention.cache_v) for attention in attentions]
    for attention in attentions:
        attention.cache_k, attention.cache_v = attention.cache_k[first:], attention.cache_v[first:]
    try:
        yield
    finally:
        for attention, (cache_k, cache_v) in zip(attentions, whole, strict=True):
            attention.cache_k, attention.cache_v = cache_k, cache_v


def move_row(model: Transformer, source: int, target: int, end: int) -> None:
    """Copy what one cache row holds at positions below `end` to another row, in every layer."""
    for attention in model.attentions():
        attention.cache_k[target, :end] = attention.cache_k[source, :end]
        attention.cache_v[target, :end] = attention.cache_v[source, :end]


# ------------------------------------------------------------------------------------ the iterator


class Decoding:
    """One call's prompts on their way to their last token; `steps` drives them, `rows` holds what came out."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[list[int]],
        request: Request,
        decoder: Callable[[list[int], list[int]], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.decoder = decoder  # decodes an unwatched model's rows in static shapes (compiled.py)
        self.request = request
        window = model.params.max_seq_len
        self.rows = [
            RowState(i, prompt, min(window, len(prompt) + request.max_gen_len), list(prompt))
            for i, prompt in enumerate(prompts)
        ]
        self.reach = 0  # cache positions that the steps may come to read
        self.reused = 0  # positions of a single prompt that its cache row holds already
        self.batch_size: int = model.params.max_batch_size
        one_length = len({len(prompt) for prompt in prompts}) <= 1
        self.aligned = one_length and len(self.rows) <= self.batch_size  # every row stays at the same position
        self._equip_rows()

    def _equip_rows(self) -> None:
        copies: Counter[tuple[int, ...]] = Counter()
        for row in self.rows:
            if self.request.sampling.seed is not None:
                row.generator = row_generator(self.request.sampling.seed, row.prompt, copies[tuple(row.prompt)])
                copies[tuple(row.prompt)] += 1
            if self.request.stop_text is not None:
                row.stop_text = self.request.stop_text()

    def reuse(self, cached: Sequence[int]) -> None:
        """Skip what a single prompt shares with the ids in cache row 0; its last token is fed in any case."""
        if len(self.rows) == 1:
            pairs = zip(cached, self.rows[0].prompt[:-1], strict=False)
            self.reused = next(
                (n for n, (old, new) in enumerate(pairs) if old != new), min(len(cached), len(self.rows[0].prompt) - 1)
            )

    def steps(self) -> Iterator[Step]:
        """Step after step, rows that decode side by side in turn; nothing is computed ahead of the consumer."""
        self.reach = max((row.limit for row in self.rows), default=0)
        needy = [row for row in self.rows if row.has_room or row.unscored(self.request)]
        with parallel.translate_distributed_errors():
            if not has_hooks_or_overrides(self.model):
                yield from self._batched(deque(needy))
                return
            for first in range(0, len(needy), self.batch_size):
                yield from self._published(needy[first : first + self.batch_size])

    # -------------------------------------------------------------------- the published schedule

    def _published(self, rows: list[RowState]) -> Iterator[Step]:
        """The prompts up to the shortest one's length at once, then one position a step for all rows."""
        if not rows:
            return
        tokens = torch.zeros((len(rows), max(row.limit for row in rows) + 1), dtype=torch.long)  # (n, s)
        for i, row in enumerate(rows):
            tokens[i, : len(row.prompt)] = torch.tensor(row.prompt)
        previous, current = self.reused, min(len(row.prompt) for row in rows)
        while any(row.has_room or row.unscored(self.request) for row in rows):
            logits = self.model.forward(self._to_device(tokens[:, previous:current]), previous)  # (n, s, v)
            for i, row in enumerate(rows):
                if row.unscored(self.request):
                    self._score(row, logits[i], previous)
            choosing = [i for i, row in enumerate(rows) if row.has_room and len(row.tokens) == current]
            if choosing:
                yield from self._choose(logits[choosing, -1], [rows[i] for i in choosing])
                for i in choosing:
                    tokens[i, current] = rows[i].tokens[-1]
            previous, current = current, current + 1

    def _to_device(self, tokens: Tensor) -> Tensor:
        """Where the model's weights are; a stub without weights gets the ids on the CPU."""
        parameters = getattr(self.model, "parameters", None)
        first = next(iter(parameters()), None) if callable(parameters) else None
        return tokens if not isinstance(first, Tensor) else tokens.to(first.device)

    # -------------------------------------------------------------------------- our own schedule

    def _batched(self, waiting: deque[RowState]) -> Iterator[Step]:
        """Active rows are cache rows 0 to len(active) - 1; whenever one is free and a prompt waits, it moves in."""
        active: list[RowState] = []
        while waiting or active:
            if waiting and len(active) < self.batch_size:
                count = min(self.batch_size - len(active), len(waiting))
                new = sorted((waiting.popleft() for _ in range(count)), key=lambda row: -len(row.prompt))
                logits = self._prefill(new, first=len(active))
                active += new
                yield from self._choose(logits, [row for row in new if row.has_room])
            else:
                yield from self._choose(self._decode(active), list(active))
            self._retire(active)

    @torch.no_grad()
    def _prefill(self, new: list[RowState], first: int) -> Tensor:
        """Feed the prompts of `new`, longest first, into the cache from row `first`; the last logits (n, v) of each
        row that generates. Padding stands right of a row's prompt, so that no token of it sees any.
        """
        last: dict[int, Tensor] = {}
        longest, chunk = len(new[0].prompt), self.request.prefill_chunk
        with cache_rows(self.model, first):
            for start in range(self.reused, longest, chunk):
                feeding = [row for row in new if len(row.prompt) > start]
                width = min(chunk, longest - start)
                pieces = [row.prompt[start : start + width] for row in feeding]
                tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces])  # (n, s)
                h = self.model.hidden(tokens, start)  # (n, s, d)
                for i, row in enumerate(feeding):
                    if len(row.prompt) <= start + width:
                        last[row.index] = h[i, len(row.prompt) - start - 1]
                    if row.unscored(self.request):
                        self._score(row, self._head(h[i, : len(pieces[i])]), start)
        if self.decoder is not None or not self.aligned:
            end = self.reach if self.decoder is None else self.model.params.max_seq_len
            for i, row in enumerate(new):
                self.model.clear_row(first + i, len(row.prompt), end)
        states = [last[row.index] for row in new if row.has_room]
        return self._head(torch.stack(states)) if states else torch.empty(0, 0)

    @torch.no_grad()
    def _decode(self, active: list[RowState]) -> Tensor:
        """Feed each row's newest token at the row's own position; logits (n, v)."""
        positions = [len(row.tokens) - 1 for row in active]
        if self.decoder is not None:
            return self.decoder([row.tokens[-1] for row in active], positions)
        tokens = torch.tensor([[row.tokens[-1]] for row in active])  # (n, 1)
        start_pos = positions[0] if len(set(positions)) == 1 else torch.tensor(positions)
        return self._head(self.model.hidden(tokens, start_pos)[:, -1])

    def _head(self, h: Tensor) -> Tensor:
        return self.model.output(h).float()  # type: ignore[no-any-return]

    def _retire(self, active: list[RowState]) -> None:
        """Take finished rows out; the last active row moves into the gap, so that active rows stay together."""
        for i in reversed(range(len(active))):
            if not active[i].has_room:
                last = active.pop()
                if i < len(active):
                    move_row(self.model, len(active), i, self.reach)
                    active[i] = last

    # ------------------------------------------------------------------------------ one step's end

    def _score(self, row: RowState, logits: Tensor, start: int) -> None:
        """Append the log-probabilities of the prompt's tokens start + 1 .. from logits (s, v) of start .. ."""
        wanted = torch.tensor(row.prompt[start + 1 : start + 1 + len(logits)], dtype=torch.long, device=logits.device)
        found = F.log_softmax(logits[: len(wanted)].float(), dim=-1).gather(-1, wanted[:, None])[:, 0]  # (s,)
        if bool(found.isnan().any()):
            raise _broken(row, f"at prompt position {start + int(found.isnan().nonzero()[0])}")
        row.prompt_logprobs += found.tolist()

    def _choose(self, logits: Tensor, rows: list[RowState]) -> Iterator[Step]:
        """The next token of each row from its logits (n, v), the same on every rank."""
        if not rows:
            return
        for row, token, logprob, top in self._pick(logits, rows):
            yield self._advance(row, token, logprob, top)

    @torch.no_grad()
    def _pick(
        self, logits: Tensor, rows: list[RowState]
    ) -> list[tuple[RowState, int, float | None, dict[int, float] | None]]:
        request, logits = self.request, logits.float()  # a stub's may be of any type
        broken = ~torch.isfinite(logits.amax(-1))  # NaN, +inf, or nothing but -inf
        sound = logits if logits.device.type == "cpu" and not broken.any() else logits.masked_fill(broken[:, None], 0.0)
        tokens = parallel.broadcast(torch.where(broken, -1, self._draw(sound, rows)))  # (n,)
        logprobs: list[float | None] = [None] * len(rows)
        tops: list[dict[int, float] | None] = [None] * len(rows)
        if request.logprobs:
            table = F.log_softmax(sound, dim=-1)  # (n, v): of the raw logits, as published
            found = table.gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
            chosen, *values = torch.stack([tokens.double(), found.double()]).tolist()
            ids, logprobs = [int(token) for token in chosen], values[0]
            if request.sampling.top_logprobs:
                best = torch.topk(table, min(request.sampling.top_logprobs, table.shape[-1]), dim=-1)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                tops = [dict(zip(keys, numbers, strict=True)) for keys, numbers in pairs]
        else:
            ids = tokens.tolist()
        for row, token in zip(rows, ids, strict=True):
            if token < 0:
                raise _broken(row, f"at step {len(row.output)}")
        return list(zip(rows, ids, logprobs, tops, strict=True))

    def _draw(self, logits: Tensor, rows: list[RowState]) -> Tensor:
        """Ids (n,) from sound raw logits (n, v)."""
        settings = self.request.sampling
        if settings.penalises:
            for row in rows:
                row.history = row.history or History(row.tokens, logits.shape[-1], logits.device)
            logits = penalise(logits, [row.history for row in rows if row.history is not None], settings)
        if settings.logit_bias:
            logits = add_bias(logits, settings.logit_bias)
        if settings.temperature == 0:
            return torch.argmax(logits, dim=-1)
        probs = distribution(logits, settings)
        if settings.seed is not None:
            uniform = torch.stack([torch.rand((), generator=row.generator, dtype=torch.float64) for row in rows])
            return sample_at(probs, settings.top_p, uniform.to(probs.device, probs.dtype))[:, 0]
        slots = [row.index for row in rows] if self.aligned else list(range(len(rows)))
        return sample_in_slots(probs, settings.top_p, slots, len(self.rows) if self.aligned else len(rows))[:, 0]

    def _advance(self, row: RowState, token: int, logprob: float | None, top: dict[int, float] | None) -> Step:
        """Give the row its token; the step says whether it was the last."""
        row.tokens.append(token)
        if logprob is not None:
            row.logprobs.append(logprob)
        if top is not None:
            row.top_logprobs.append(top)
        if row.history is not None:
            row.history.add(token)
        if token in self.request.stop_ids or (row.stop_text is not None and row.stop_text.seen(token)):
            row.finish_reason = "stop"
        elif len(row.tokens) >= row.limit:
            row.finish_reason = "length"
        return Step(row.index, token, logprob, row.finish_reason)


def _broken(row: RowState, where: str) -> LlamaError:
    return LlamaError(
        f"prompt {row.index}: the model's logits {where} are NaN, +inf or all -inf (they must be finite): "
        f"a float16 model that overflows runs in dtype='bfloat16' or 'float32'; else check the weights "
        f"(python -m llama info CKPT --check)"
    )
