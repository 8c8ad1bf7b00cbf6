"""Stop strings: the text of a row is let through up to the first of them."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import LlamaError
from ..tokenizer import StreamDecoder


def check_stops(stops: Any) -> tuple[str, ...]:
    """The stop strings as a tuple; LlamaError unless they are texts, none of them empty."""
    listed = isinstance(stops, Iterable) and not isinstance(stops, str)
    if not listed or not all(isinstance(stop, str) and stop for stop in stops):
        raise LlamaError(f"stop={stops!r} must be a list of texts, none of them empty")
    return tuple(stops)


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
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            passed, self._held = self._held[: min(places)], ""
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


class StopWatch:
    """Whether the text of one row, token by token, has reached a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer, keep_space=True)
        self._filter = StopFilter(stops)

    def seen(self, token: int) -> bool:
        """Take the row's next token; whether a stop string is complete."""
        self._filter.put(self._decoder.put(token))
        return self._filter.found
