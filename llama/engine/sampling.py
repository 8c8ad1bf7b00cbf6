"""From logits to the next token: settings, penalties, filters and the draw; pure functions of their arguments.

The order is: penalties and bias on the raw logits, temperature, top-k, min-p, top-p (nucleus sampling, arXiv
1904.09751), draw. Letters: n rows, v vocabulary.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..arguments import as_integer, as_number, check_integer, check_number
from ..errors import LlamaError

FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are the published ones; every other field starts at "off".

    LlamaError names the field, the value and the range.
    """

    temperature: float = 0.6  # 0 is argmax
    top_p: float = 0.9  # keep the likeliest tokens up to this mass
    top_k: int = 0  # keep the k likeliest; 0 is off
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest
    repetition_penalty: float = 1.0  # of tokens in prompt and output: divides positive logits, multiplies negative ones
    frequency_penalty: float = 0.0  # taken off for each time a token stands in the output
    presence_penalty: float = 0.0  # taken off once for a token that stands in the output
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these ids
    seed: int | None = None  # None draws from torch's global generator, as published
    top_logprobs: int = 0  # report that many likeliest tokens beside each one

    def __post_init__(self) -> None:
        largest = FLOAT32.max  # logits are float32
        self._number("temperature", 0, largest, "from 0 (greedy) up, finite")
        self._number("top_p", 0, 1, "from 0 to 1")
        self._integer("top_k", 0, "an integer from 0 (off) up")
        self._number("min_p", 0, 1, "from 0 (off) to 1")
        self._number("repetition_penalty", 0, largest, "above 0, finite; 1 is off")
        if self.repetition_penalty == 0:
            raise LlamaError("repetition_penalty=0 must be above 0, finite; 1 is off")
        self._number("frequency_penalty", -largest, largest, "finite; 0 is off")
        self._number("presence_penalty", -largest, largest, "finite; 0 is off")
        self._integer("top_logprobs", 0, "an integer from 0 (off) up")
        if self.seed is not None:
            self._integer("seed", -(2**63), "None or an integer of 64 bits")
            if self.seed >= 2**64:
                raise LlamaError(f"seed={self.seed} must be None or an integer of 64 bits")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))

    def _number(self, name: str, low: float, high: float, words: str) -> None:
        object.__setattr__(self, name, check_number(name, getattr(self, name), low, high, words))

    def _integer(self, name: str, low: int, words: str) -> None:
        object.__setattr__(self, name, check_integer(name, getattr(self, name), low, words))

    @property
    def penalizes(self) -> bool:
        """Whether the choice looks back at earlier tokens."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @classmethod
    def names(cls) -> frozenset[str]:
        """The fields, which are also the keywords of `generate`."""
        return frozenset(field.name for field in fields(cls))


def _check_bias(bias: Any) -> dict[int, float]:
    """`bias` with plain keys and values; -inf, and what float32 cannot hold, bans a token."""
    if not isinstance(bias, Mapping):
        raise LlamaError(f"logit_bias={bias!r:.80} must be a dict from token id to a number")
    checked = {}
    for key, value in bias.items():
        token, number = as_integer(key), as_number(value)
        if token is None or number is None or not number <= FLOAT32.max:
            raise LlamaError(
                f"logit_bias={{{key!r:.40}: {value!r:.40}}} must map a token id to a number below float32's limit"
            )
        checked[token] = number if number >= FLOAT32.min else -math.inf
    return checked


# ---------------------------------------------------------------------------------------- the logits


class History:
    """What one row has said: how often each id stands in the output, and which ids stand in prompt or output."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(vocab_size, device=device)  # (v,)
        seen = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")  # where a strange id is no more than an error
        seen[torch.tensor(list(prompt), dtype=torch.long, device="cpu")] = True
        self.seen = seen.to(device)  # (v,)

    def add(self, token: int) -> None:
        """Note one more id of the output."""
        self.counts[token] += 1
        self.seen[token].fill_(True)


def penalize(logits: Tensor, histories: Sequence[History], settings: Sampling) -> Tensor:
    """Raw logits (n, v) after repetition (CTRL, arXiv 1909.05858), frequency and presence penalties."""
    counts = torch.stack([history.counts for history in histories])  # (n, v)
    seen = torch.stack([history.seen for history in histories])  # (n, v)
    if settings.repetition_penalty != 1:
        penalty = settings.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    return logits - settings.frequency_penalty * counts - settings.presence_penalty * (counts > 0)


def bias_vector(bias: Mapping[int, float], vocab_size: int) -> Tensor:
    """The bias of every id, float32 (v,) on the CPU; LlamaError for an id outside the vocabulary."""
    for token in bias:
        if not 0 <= token < vocab_size:
            raise LlamaError(f"logit_bias names id {token}, but the vocabulary has ids 0 to {vocab_size - 1}")
    vector = torch.zeros(vocab_size, dtype=torch.float32, device="cpu")
    vector[list(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32, device="cpu")
    return vector


# ---------------------------------------------------------------------------------- the distribution


def distribution(logits: Tensor, settings: Sampling) -> Tensor:
    """Probabilities (n, v) after temperature (above 0), top-k and min-p; top-p comes with the draw."""
    temperature = max(settings.temperature, 1e-30)
    scaled = logits / temperature
    if temperature < 1:  # the division may overflow; from its largest value down it cannot
        from_top = (logits - logits.amax(-1, keepdim=True)) / temperature
        scaled = torch.where(torch.isfinite(scaled.amax(-1, keepdim=True)), scaled, from_top)
    if 0 < settings.top_k < scaled.shape[-1]:
        values, ids = torch.topk(scaled, settings.top_k, dim=-1)
        scaled = torch.full_like(scaled, -math.inf).scatter(-1, ids, values)
    probs = torch.softmax(scaled, dim=-1)
    if settings.min_p > 0:
        probs = torch.where(probs < settings.min_p * probs.amax(-1, keepdim=True), 0.0, probs)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def nucleus(probs: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Sorted probabilities (n, v), zero beyond the mass p and renormalised, and the ids they belong to (n, v)."""
    probs_sort, probs_idx = torch.sort(probs, dim=-1, descending=True)
    before = torch.cumsum(probs_sort, dim=-1) - probs_sort  # the mass of all likelier tokens
    probs_sort[before > p] = 0.0
    probs_sort.div_(probs_sort.sum(dim=-1, keepdim=True))
    return probs_sort, probs_idx


def sample_top_p(probs: Tensor, p: float) -> Tensor:
    """One id (n, 1) from each row of probs (n, v), among the likeliest tokens that together reach mass p.

    Draws from torch's global generator, exactly as published.
    """
    probs_sort, probs_idx = nucleus(probs, p)
    return torch.gather(probs_idx, -1, torch.multinomial(probs_sort, num_samples=1))


def sample_in_slots(probs: Tensor, p: float, slots: Sequence[int], n_slots: int) -> Tensor:
    """`sample_top_p` that draws for n_slots rows and keeps those in `slots`: (n, v) to (n, 1).

    So rows that have finished use up their share of random numbers, as published, without a forward pass.
    """
    if len(slots) == n_slots:
        return sample_top_p(probs, p)
    probs_sort, probs_idx = nucleus(probs, p)
    row = {slot: i for i, slot in enumerate(slots)}  # views by number: a GPU would wait for a list of them
    padded = torch.stack([probs_sort[row.get(slot, 0)] for slot in range(n_slots)])  # (n_slots, v)
    drawn = torch.multinomial(padded, num_samples=1)
    return torch.gather(probs_idx, -1, torch.stack([drawn[slot] for slot in slots]))


def sample_at(probs: Tensor, p: float, uniform: Tensor) -> Tensor:
    """One id (n, 1) from each row: where its cumulative probability passes uniform (n,) in [0, 1)."""
    probs_sort, probs_idx = nucleus(probs, p)
    reached = torch.cumsum(probs_sort, dim=-1)  # (n, v)
    place = torch.searchsorted(reached, (uniform[:, None] * reached[:, -1:]).to(reached.dtype), right=True)  # (n, 1)
    last = (probs_sort > 0).sum(-1, keepdim=True) - 1  # rounding may point past the last token that is kept
    return torch.gather(probs_idx, -1, torch.minimum(place, last))


def row_generator(seed: int, prompt: Sequence[int], copy: int) -> torch.Generator:
    """A row's own generator: it depends on the seed, the prompt and how many equal ones came before it, no more."""
    text = f"{seed}|{copy}|{','.join(map(str, prompt))}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    return torch.Generator("cpu").manual_seed(number)
