"""What one call asks for, the rows it is made of, and the steps they take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from .sampling import History, Sampling


class Step(NamedTuple):
    """One token of one prompt. `finish_reason` is "stop" or "length" on a row's last step, else None.

    A stop token is handed out as the last step's token. `logprob` is None unless it was asked for.
    """

    prompt: int
    token: int
    logprob: float | None
    finish_reason: str | None


class StopText(Protocol):
    """Looks for a stop string in one row's text."""

    def put(self, token: int) -> bool:
        """Take the row's next token; whether a stop string is complete."""
        ...

    def end(self) -> bool:
        """No more tokens come; whether the text that was held back completes a stop string."""
        ...


@dataclass(frozen=True)
class Request:
    """The checked settings of one call, beside its prompts."""

    max_gen_len: int
    sampling: Sampling
    stop_ids: frozenset[int]
    logprobs: bool = False
    score_prompt: bool = False  # log-probabilities of the prompt's tokens too
    banned: tuple[int, ...] = ()  # ids that are never drawn: no text has them
    prefill_chunk: int = 512  # positions a row is prefilled with at once
    stop_text: Callable[[], StopText] | None = None


@dataclass
class RowState:
    """One prompt on its way: its tokens so far, what is known of them, and what the sampler keeps for it."""

    index: int
    prompt: list[int]
    limit: int  # tokens at most, the prompt's among them
    tokens: list[int] = field(default_factory=list)  # of the prompt and the output
    prompt_logprobs: list[float] = field(default_factory=lambda: [0.0])
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=lambda: [{}])
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    reused: int = 0  # positions of the prompt that the cache held already
    draws: Tensor | None = None  # a number in [0, 1) for each token to come, where a seed was given
    history: History | None = None  # made when a penalty first looks at it
    stop_text: StopText | None = None

    @property
    def output(self) -> list[int]:
        """The ids behind the prompt; the last may be a stop token."""
        return self.tokens[len(self.prompt) :]

    @property
    def unfinished(self) -> bool:
        """Whether another token is to come."""
        return self.finish_reason is None and len(self.tokens) < self.limit

    def unscored(self, request: Request) -> bool:
        """Whether some of the prompt's log-probabilities are wanted and not there yet."""
        return request.score_prompt and len(self.prompt_logprobs) < len(self.prompt)

    def take_prefix(self, source: "RowState", length: int) -> None:
        """The cache holds `length` positions that are also `source`'s, which knows what came of them."""
        self.reused = length
        self.prompt_logprobs = source.prompt_logprobs[: length + 1]
        self.prompt_top_logprobs = source.prompt_top_logprobs[: length + 1]

    def advance(self, token: int, request: Request) -> str | None:
        """Take the next token; the reason to finish with it, if there is one."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)
        at_limit = len(self.tokens) >= self.limit
        found = self.stop_text is not None and (self.stop_text.put(token) or (at_limit and self.stop_text.end()))
        if token in request.stop_ids or found:
            self.finish_reason = "stop"
        elif at_limit:
            self.finish_reason = "length"
        return self.finish_reason


def make_rows(prompts: Sequence[list[int]], request: Request, max_seq_len: int) -> list[RowState]:
    """A row for each prompt; one that leaves no room for a token has ended with "length"."""
    rows = []
    for i, prompt in enumerate(prompts):
        row = RowState(i, prompt, min(max_seq_len, len(prompt) + request.max_gen_len), list(prompt))
        row.finish_reason = "length" if row.limit <= len(prompt) else None
        row.stop_text = request.stop_text() if request.stop_text else None
        rows.append(row)
    return rows
