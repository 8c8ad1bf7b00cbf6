"""From texts to ids, and back while they arrive, up to the first stop string."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..arguments import check_list, check_text
from ..tokenizer import StreamDecoder

logger = logging.getLogger("llama")


class StopFilter:
    """Lets text through up to the first stop string, holding back an end that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def put(self, text: str) -> str:
        """The text that is certain to stand before any stop string."""
        if self.found:
            return ""
        self._held += text
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            self.found = True
            passed, self._held = self._held[: min(starts)], ""
            return passed
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return passed

    def _overlap(self, stop: str) -> int:
        """How long an end of the held text begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def end(self) -> str:
        """What was held back, now that no more text comes."""
        rest, self._held = self._held, ""
        return rest


class StopDetector:
    """Whether the text of one row, token by token, has reached a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer, keep_space=True)
        self._filter = StopFilter(stops)

    def put(self, token: int) -> bool:
        """Take the row's next token; whether a stop string is complete."""
        self._filter.put(self._decoder.put(token))
        return self._filter.found

    def end(self) -> bool:
        """Whether the bytes held back, as the text they are without more tokens, complete a stop string."""
        self._filter.put(self._decoder.end())
        return self._filter.found


def text_chunks(
    tokenizer: Any, tokens: Iterable[int], stops: Sequence[str], keep_space: bool, n_echoed: int = 0
) -> Iterator[str]:
    """The text of ids in chunks, each as soon as it is certain, up to the first stop string.

    Stops are not looked for in the text of the first `n_echoed` ids, which are the prompt's.
    """
    decoder = StreamDecoder(tokenizer, keep_space=True)
    stop = StopFilter(stops)
    at_start = not keep_space
    for count, chunk in enumerate(_decoded(decoder, tokens), 1):
        text = chunk if count <= n_echoed else stop.put(chunk)
        if text and at_start:
            text, at_start = text.removeprefix(decoder.lead), False
        if text:
            yield text
    if rest := stop.end():
        yield rest.removeprefix(decoder.lead) if at_start else rest


def _decoded(decoder: StreamDecoder, tokens: Iterable[int]) -> Iterator[str]:
    """What each id adds to the text, then what was held back."""
    for token in tokens:
        yield decoder.put(token)
    yield decoder.end()


def decode_tokens(
    tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], keep_space: bool, n_echoed: int = 0
) -> str:
    """The whole text of ids, cut before the first stop string; arguments as in `text_chunks`."""
    if not stops and not keep_space:
        return tokenizer.decode(tokens)  # type: ignore[no-any-return]
    return "".join(text_chunks(tokenizer, tokens, stops, keep_space, n_echoed))


def decode_each(tokenizer: Any, tokens: Sequence[int], keep_space: bool, alone: bool = False) -> list[str]:
    """Each token's text, as published. With `keep_space` what it adds, so that the texts join to the whole, or, where
    the tokens do not follow each other, what it is `alone` with its space.
    """
    if not keep_space:
        return [tokenizer.decode(token) for token in tokens]
    if alone:
        return ["".join(decode_each(tokenizer, [token], keep_space)) for token in tokens]
    decoder = StreamDecoder(tokenizer, keep_space=True)
    texts = [decoder.put(token) for token in tokens]
    return [*texts[:-1], texts[-1] + decoder.end()] if texts else []


def encode_prompt(tokenizer: Any, row: int, prompt: Any) -> list[int]:
    """The ids of `text_completion`'s prompt; a log line where it ends in a space. LlamaError for what is no text."""
    text = check_text(f"prompt {row}", prompt, "text_completion takes texts (ids: generate)")
    if text.endswith(" "):
        logger.warning("prompt %d ends in a space: the next token usually brings its own, so text may read worse", row)
    return tokenizer.encode(text, bos=True, eos=False)  # type: ignore[no-any-return]


def encode_all(tokenizer: Any, prompts: Any) -> list[list[int]]:
    """The ids of texts with BOS; lists of ids as they are."""
    listed = check_list("prompts", prompts, "texts or of lists of token ids")
    return [tokenizer.encode(p, bos=True, eos=False) if isinstance(p, str) else p for p in listed]
