"""The sampler of one call: logits and each row's state in, tokens and log-probabilities out."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed import broadcast
from ..errors import LlamaError
from ..interrupts import no_grad
from .request import RowState
from .sampling import (
    History,
    Sampling,
    add_bias,
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
    None where a step draws for its own rows only.
    """

    def __init__(self, settings: Sampling, rows: Sequence[RowState], n_slots: int | None = None) -> None:
        self.settings = settings
        self.n_slots = n_slots
        copies: Counter[tuple[int, ...]] = Counter()  # equal prompts draw apart
        for row in rows if settings.seed is not None else ():
            row.generator = row_generator(settings.seed or 0, row.prompt, copies[tuple(row.prompt)])
            copies[tuple(row.prompt)] += 1

    @no_grad
    def sample(self, logits: Tensor, rows: Sequence[RowState], logprobs: bool = False, probs: bool = False) -> Samples:
        """One token for each row of raw logits (n, v), with log-probabilities and the distribution where asked.

        Every rank draws and the first one's tokens count. LlamaError naming the row where logits are not finite, or
        where bias and penalties leave no token.
        """
        raw = logits.float()  # a stub's may be of any type
        adjusted = self._adjust(raw, rows)  # (n, v)
        usable = torch.isfinite(adjusted.amax(-1))  # (n,): no NaN, no +inf, not -inf throughout
        if usable.device.type != "cpu" or not usable.all():  # `multinomial`'s own check would end a CUDA process
            adjusted = adjusted.masked_fill(~usable[:, None], 0.0)
        chosen = broadcast(torch.stack([self._draw(adjusted, rows), usable.long()]))  # (2, n)
        tokens, good = chosen.tolist()
        if not all(good):
            raise _unusable(rows[good.index(0)], raw[good.index(0)])
        chances = self.probs(adjusted) if probs else None
        if not logprobs:
            return Samples(tokens, None, None, chances)
        table = F.log_softmax(raw, dim=-1)  # (n, v)
        return Samples(tokens, table.gather(-1, chosen[0, :, None])[:, 0].tolist(), self.top(table), chances)

    def top(self, table: Tensor) -> list[dict[int, float]] | None:
        """The likeliest ids of each row of log-probabilities (n, v), where they were asked for."""
        if not self.settings.top_logprobs:
            return None
        best = torch.topk(table, min(self.settings.top_logprobs, table.shape[-1]), dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [dict(zip(ids, values, strict=True)) for ids, values in pairs]

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution (n, v) that adjusted logits (n, v) are drawn from."""
        if self.settings.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        probs_sort, probs_idx = nucleus(distribution(logits, self.settings), self.settings.top_p)
        return torch.zeros_like(probs_sort).scatter(-1, probs_idx, probs_sort)

    def _adjust(self, logits: Tensor, rows: Sequence[RowState]) -> Tensor:
        """Raw logits (n, v) after penalties and bias."""
        if self.settings.penalizes:
            for row in rows:
                row.history = row.history or History(row.tokens, logits.shape[-1], logits.device)
            logits = penalize(logits, [row.history for row in rows if row.history is not None], self.settings)
        return add_bias(logits, self.settings.logit_bias) if self.settings.logit_bias else logits

    def _draw(self, logits: Tensor, rows: Sequence[RowState]) -> Tensor:
        """Ids (n,) from finite adjusted logits (n, v)."""
        if self.settings.temperature == 0:
            return torch.argmax(logits, dim=-1)
        probs, top_p = distribution(logits, self.settings), self.settings.top_p
        if self.settings.seed is None:
            slots = [row.index for row in rows] if self.n_slots else list(range(len(rows)))
            return sample_in_slots(probs, top_p, slots, self.n_slots or len(rows))[:, 0]
        draws = [torch.rand((), generator=row.generator, dtype=torch.float64, device="cpu") for row in rows]
        return sample_at(probs, top_p, torch.stack(draws).to(probs.device, probs.dtype))[:, 0]


def score_prompt(row: RowState, logits: Tensor, start: int, sampler: Sampler) -> None:
    """Append the log-probabilities of the prompt's tokens start + 1 .. from logits (s, v) of positions start .. ."""
    wanted = torch.tensor(row.prompt[start + 1 : start + 1 + len(logits)], dtype=torch.long, device=logits.device)
    if not len(wanted):
        return
    table = F.log_softmax(logits[: len(wanted)].float(), dim=-1)  # (s, v)
    found = table.gather(-1, wanted[:, None])[:, 0].tolist()
    bad = next((i for i, value in enumerate(found) if value != value), None)
    if bad is not None:
        raise non_finite(row, f"at prompt position {start + bad}")
    row.prompt_logprobs += found
    row.prompt_top_logprobs += sampler.top(table) or []


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
