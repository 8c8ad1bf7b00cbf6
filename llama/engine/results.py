"""What a call hands out: lists for `generate`, an iterator for the streams."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from typing_extensions import NotRequired, Self

from ..chat import Message
from ..errors import LlamaError
from .cache import cache_state
from .request import Request, RowState, Step
from .sampling import Sampling
from .scheduler import Scheduler
from .text import decode_each, decode_tokens, text_chunks

T = TypeVar("T")


class CompletionPrediction(TypedDict):
    """One result of `text_completion`; what follows "generation" is there when it was asked for."""

    generation: str
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]
    top_logprobs: NotRequired[list[list[tuple[str, float]]]]
    finish_reason: NotRequired[str]
    prompt_tokens: NotRequired[int]
    completion_tokens: NotRequired[int]


class ChatPrediction(TypedDict):
    """One result of `chat_completion`; what follows "generation" is there when it was asked for."""

    generation: Message
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]
    top_logprobs: NotRequired[list[list[tuple[str, float]]]]
    finish_reason: NotRequired[str]
    prompt_tokens: NotRequired[int]
    completion_tokens: NotRequired[int]
    dropped: NotRequired[int]  # messages that `drop_oldest` left out


def completion_length(row: RowState, request: Request) -> int:
    """Tokens of the output, without the stop token."""
    stopped = row.finish_reason == "stop" and row.output[-1] in request.stop_ids
    return len(row.output) - stopped


def details(row: RowState, request: Request, echo: bool = False) -> dict[str, Any]:
    """Why and where a row ended, with its alternatives where they were asked for."""
    count = completion_length(row, request)
    found = {"finish_reason": row.finish_reason or "length", "prompt_tokens": len(row.prompt)}
    found["completion_tokens"] = count
    if request.sampling.top_logprobs:
        found["top_logprobs"] = (row.prompt_top_logprobs if echo else []) + row.top_logprobs[:count]
    return found


def collect(rows: list[RowState], request: Request, echo: bool) -> tuple[list[list[int]], list[list[float]]]:
    """Each row's tokens and log-probabilities, behind the prompt's where `echo`."""
    tokens, logprobs = [], []
    for row in rows:
        count = completion_length(row, request)
        tokens.append((row.prompt if echo else []) + row.output[:count])
        logprobs.append((row.prompt_logprobs if echo else []) + row.logprobs[:count])
    return tokens, logprobs


def texts(
    tokenizer: Any, results: Any, options: Mapping[str, Any], keep_space: bool, echoed: list[list[int]] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of `generate`'s results as a text, and what was asked for beside it; `echoed` are prompts that are in it."""
    tokens, logprobs, *notes = results
    for i, ids in enumerate(tokens):
        extras: dict[str, Any] = {}
        if logprobs is not None:
            extras = {"tokens": decode_each(tokenizer, ids, keep_space), "logprobs": logprobs[i]}
        if options.get("top_logprobs"):
            extras["top_logprobs"] = [
                list(zip(decode_each(tokenizer, list(best), keep_space, alone=True), best.values(), strict=True))
                for best in notes[0][i]["top_logprobs"]
            ]
        if options.get("details"):
            extras |= {key: notes[0][i][key] for key in ("finish_reason", "prompt_tokens", "completion_tokens")}
        n_echoed = len(echoed[i]) if echoed else 0
        yield decode_tokens(tokenizer, ids, options.get("stop", ()), keep_space, n_echoed), extras


def refusal(message: str, logprobs: bool, options: Mapping[str, Any]) -> Any:
    """A completion's answer to a dialog that is not taken."""
    answer: dict[str, Any] = {"generation": {"role": "assistant", "content": message}}
    if logprobs:
        answer |= {"tokens": [], "logprobs": []}
    if options.get("top_logprobs"):
        answer["top_logprobs"] = []
    if options.get("details"):
        answer |= {"finish_reason": "refused", "prompt_tokens": 0, "completion_tokens": 0}
    return answer


class Stream(itertools.chain[T]):
    """An iterator of steps or of text that frees the model when it is exhausted, closed or dropped, and a context
    manager. `finish_reason`, `usage` and `tokens` tell what there is so far; of several prompts, in lists.

    A chain of one, whose `next` is C: a KeyboardInterrupt in it meets the items, which end, and no line of ours.
    """

    def __new__(cls, items: Iterator[T], rows: list[RowState], request: Request) -> Self:
        return super().__new__(cls, items)

    def __init__(self, items: Iterator[T], rows: list[RowState], request: Request) -> None:
        self._items = items
        self.rows, self.request = rows, request

    def close(self) -> None:
        """End the stream and free the model. Idempotent."""
        close: Callable[[], None] | None = getattr(self._items, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def finish_reason(self) -> Any:
        """ "stop", "length" or "refused"; None while the prompt goes on, or where the stream was closed early."""
        return self._of_each([row.finish_reason for row in self.rows])

    @property
    def tokens(self) -> Any:
        """Ids of the output, without the stop token."""
        return self._of_each([row.output[: completion_length(row, self.request)] for row in self.rows])

    @property
    def logprobs(self) -> Any:
        """The log-probability of each token, where `logprobs` was asked for."""
        return self._of_each([row.logprobs[: completion_length(row, self.request)] for row in self.rows])

    @property
    def top_logprobs(self) -> Any:
        """A dict from id to log-probability for each token, where `top_logprobs` was asked for."""
        return self._of_each([row.top_logprobs[: completion_length(row, self.request)] for row in self.rows])

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of all prompts, how many of them the cache still held, and tokens of all outputs so far."""
        prompt = sum(len(row.prompt) for row in self.rows)
        output = sum(completion_length(row, self.request) for row in self.rows)
        cached = sum(row.reused for row in self.rows)
        return {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": output}

    def _of_each(self, values: list[Any]) -> Any:
        return values[0] if len(self.rows) == 1 else values


def stream_steps(generator: Any, scheduler: Scheduler, options: Mapping[str, Any], reuse: bool = False) -> Stream[Step]:
    """A scheduler's steps, while nobody else may use the model's cache; `reuse` as in `Llama.stream_prompt`."""
    for name in ("details", "progress"):
        if options.get(name):
            raise LlamaError(f"{name}=True is for whole results: a stream has finish_reason, usage and tokens")
    state, model, rows = cache_state(generator), scheduler.model, scheduler.rows

    def steps() -> Iterator[Step]:
        if reuse:
            scheduler.reuse_prefix(state.take(model))
        try:
            yield from scheduler.steps()
        finally:
            if len(rows) == 1 and rows[0].output:
                state.note(model, rows[0].tokens[:-1])

    return Stream(state.lock.hold(steps, streaming=True), rows, scheduler.request)


def stream_text(tokenizer: Any, steps: Stream[Step], stops: Sequence[str], keep_space: bool) -> Stream[str]:
    """The text of one prompt's steps in chunks."""

    def chunks() -> Iterator[str]:
        with steps:
            tokens = (step.token for step in steps if step.token not in steps.request.stop_ids)
            yield from text_chunks(tokenizer, tokens, stops, keep_space)

    return Stream(chunks(), steps.rows, steps.request)


def refused_stream(message: str) -> Stream[str]:
    """The answer to a dialog that is not taken, as a stream."""
    row = RowState(0, [], 0, finish_reason="refused")
    return Stream(iter([message]), [row], Request(0, Sampling(), frozenset()))
