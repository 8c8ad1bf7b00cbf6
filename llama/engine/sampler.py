"""The sampler of one call: logits and each row's state in, tokens and log-probabilities out."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed import broadcast
from ..errors import LlamaError
from .request import RowState
from .sampling import (
    History,
    Sampling,
    bias_vector,
    distribution,
    nucleus,
    penalize,
    row_generator,
    sample_at,
    sample_in_slots,
)


class Samples(NamedTuple):
    """One step's choices, an entry per row."""

    tokens: list[int]
    logprobs: list[float] | None  # of the raw logits, as published
    top_logprobs: list[dict[int, float]] | None
    probs: Tensor | None  # (n, v), what the tokens were drawn from


class Sampler:
    """Chooses next tokens by one `Sampling`, the same on every rank.

    `n_slots`: rows that share each draw from torch's global generator even after some have finished, as published;
    None where a step draws for its own rows only. `banned`: ids that are never drawn.
    """

    def __init__(
        self, settings: Sampling, rows: Sequence[RowState], n_slots: int | None = None, banned: Sequence[int] = ()
    ) -> None:
        self.settings = settings
        self.n_slots = n_slots
        self._bias: Tensor | None = None  # (v,), made once a call
        self._banned = torch.tensor(banned, dtype=torch.long, device="cpu") if banned else None  # ids never drawn
        copies: Counter[tuple[int, ...]] = Counter()  # equal prompts draw apart
        for row in rows if settings.seed is not None else ():
            generator = row_generator(settings.seed or 0, row.prompt, copies[tuple(row.prompt)])
            count = max(0, row.limit - len(row.prompt))
            row.draws = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
            copies[tuple(row.prompt)] += 1

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Sequence[RowState], logprobs: bool = False, probs: bool = False) -> Samples:
        """One token for each row of raw logits (n, v), with log-probabilities and the distribution where asked.

        Every rank draws and the first one's tokens count. LlamaError naming the row where logits are not finite, or
        where bias and penalties leave no token. On a GPU the CPU waits once, for all of it.
        """
        raw = logits.float()  # a stub's may be of any type
        adjusted = self._adjust(raw, rows)  # (n, v)
        usable = torch.isfinite(adjusted.amax(-1))  # (n,): no NaN, no +inf, not -inf throughout
        if usable.device.type != "cpu" or not usable.all():  # `multinomial`'s own check would end a CUDA process
            adjusted = adjusted.masked_fill(~usable[:, None], 0.0)
        chosen = broadcast(torch.stack([self._draw(adjusted, rows), usable.long()]))  # (2, n)
        if logprobs:
            found = torch.cat([chosen.T.int(), self.scores(raw, chosen[0])], 1).cpu()  # (n, 2 + c)
            tokens, good = found[:, :2].T.tolist()
        else:
            tokens, good = chosen.tolist()
        if not all(good):
            raise _unusable(rows[good.index(0)], raw[good.index(0)])
        chances = self.probs(adjusted) if probs else None
        if not logprobs:
            return Samples(tokens, None, None, chances)
        likely, top = self.read_scores(found[:, 2:])
        return Samples(tokens, likely, top, chances)

    def scores(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of the tokens (n,), then the likeliest ids and theirs, by float32 logits (n, v): their bits
        as int32 (n, c), for one transfer to the CPU and `read_scores`.
        """
        table = F.log_softmax(logits, dim=-1)  # (n, v)
        columns = [table.gather(-1, tokens[:, None]).view(torch.int32)]
        if self.settings.top_logprobs:
            best = torch.topk(table, min(self.settings.top_logprobs, table.shape[-1]), dim=-1)
            columns += [best.indices.int(), best.values.view(torch.int32)]
        return torch.cat(columns, 1)

    def read_scores(self, found: Tensor) -> tuple[list[float], list[dict[int, float]] | None]:
        """What `scores` found, on the CPU by now: log-probabilities, and {id: log-probability} where asked."""
        logprobs: list[float] = found[:, 0].view(torch.float32).tolist()
        if not self.settings.top_logprobs:
            return logprobs, None
        ids, values = found[:, 1:].chunk(2, dim=1)
        pairs = zip(ids.tolist(), values.view(torch.float32).tolist(), strict=True)
        return logprobs, [dict(zip(*pair, strict=True)) for pair in pairs]

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution (n, v) that adjusted logits (n, v) are drawn from."""
        if self.settings.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        probs_sort, probs_idx = nucleus(distribution(logits, self.settings), self.settings.top_p)
        return torch.zeros_like(probs_sort).scatter(-1, probs_idx, probs_sort)

    def _adjust(self, logits: Tensor, rows: Sequence[RowState]) -> Tensor:
        """Raw logits (n, v) after penalties and bias, -inf for ids that are never drawn."""
        if self.settings.penalizes:
            for row in rows:
                row.history = row.history or History(row.tokens, logits.shape[-1], logits.device)
            logits = penalize(logits, [row.history for row in rows if row.history is not None], self.settings)
        if self.settings.logit_bias:
            if self._bias is None:
                self._bias = bias_vector(self.settings.logit_bias, logits.shape[-1]).to(logits.device)
            logits = logits + self._bias
        if self._banned is not None:
            self._banned = self._banned.to(logits.device)
            logits = logits.index_fill(-1, self._banned, -torch.inf)
        return logits

    def _draw(self, logits: Tensor, rows: Sequence[RowState]) -> Tensor:
        """Ids (n,) from finite adjusted logits (n, v)."""
        if self.settings.temperature == 0:
            return torch.argmax(logits, dim=-1)
        probs, top_p = distribution(logits, self.settings), self.settings.top_p
        if self.settings.seed is None:
            slots = [row.index for row in rows] if self.n_slots else list(range(len(rows)))
            return sample_in_slots(probs, top_p, slots, self.n_slots or len(rows))[:, 0]
        return sample_at(probs, top_p, torch.stack([_next_draw(row, probs) for row in rows]))[:, 0]


def _next_draw(row: RowState, like: Tensor) -> Tensor:
    """The row's number for its next token, a scalar; the first time all of them move to `like`'s device and dtype."""
    assert row.draws is not None
    row.draws = row.draws.to(like.device, like.dtype)
    return row.draws[len(row.tokens) - len(row.prompt)]


class PromptScores:
    """The log-probabilities of prompts, while they are fed: kept where the logits are, and read all at once."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._parts: list[tuple[RowState, int, Tensor]] = []

    def add(self, row: RowState, start: int, logits: Tensor, following: Tensor) -> None:
        """Logits (s, v) of the row's positions start .., and the ids (s,) that follow; those behind the prompt do not
        count.
        """
        count = min(len(logits), len(row.prompt) - start - 1)
        if count > 0:
            wanted = following[:count].to(logits.device)
            self._parts.append((row, start, self._sampler.scores(logits[:count].float(), wanted)))

    def read(self) -> None:
        """Hand the rows what is theirs; LlamaError naming the row where it is NaN."""
        if not self._parts:
            return
        found = torch.cat([part for _, _, part in self._parts]).cpu()
        lengths = [len(part) for _, _, part in self._parts]
        for (row, start, _), part in zip(self._parts, torch.split(found, lengths), strict=True):
            logprobs, top = self._sampler.read_scores(part)
            bad = next((i for i, value in enumerate(logprobs) if value != value), None)
            if bad is not None:
                raise non_finite(row, f"at prompt position {start + bad}")
            row.prompt_logprobs += logprobs
            row.prompt_top_logprobs += top or []
        self._parts.clear()


def non_finite(row: RowState, where: str) -> LlamaError:
    """The error about a model whose numbers are not finite."""
    return LlamaError(
        f"prompt {row.index}: the model's logits {where} are NaN, +inf or all -inf (they must be finite): "
        f"a float16 model that overflows runs in dtype='bfloat16' or 'float32'; else check the weights "
        f"(python -m llama info CKPT --check)"
    )


def _unusable(row: RowState, raw: Tensor) -> LlamaError:
    """The error about a row without a token to choose, given its raw logits (v,)."""
    if not torch.isfinite(raw.amax()):
        return non_finite(row, f"at step {len(row.output)}")
    return LlamaError(
        f"prompt {row.index}: at step {len(row.output)} logit_bias and penalties leave no token that could be chosen: "
        f"ban fewer tokens, or make the values smaller"
    )
