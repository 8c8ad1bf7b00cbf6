"""A prompt as the format's own control pieces and text between them, to ids: no text becomes a control piece."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..errors import LlamaError


def special_ids_of(tokenizer: Any) -> dict[str, int]:
    """Text to id of each control piece; none where a tokenizer of the caller's tells none.

    `special_tokens` is what Meta's Llama 3 tokenizer calls them.
    """
    found = getattr(tokenizer, "special_ids", None)
    if found is None:
        found = getattr(tokenizer, "special_tokens", None)
    return dict(found) if isinstance(found, dict) else {}


@lru_cache(maxsize=8)
def special_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Matches any of the control pieces' texts, as one group; the longer before those that it contains."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def encode_text(tokenizer: Any, text: str, control: frozenset[int]) -> list[int]:
    """The ids of ordinary text. LlamaError where one of `control` is among them, as a tokenizer of the caller's may do
    that makes control pieces of any text.
    """
    ids: list[int] = tokenizer.encode(text, bos=False, eos=False)
    if not control.isdisjoint(ids):
        raise LlamaError(f"the tokenizer makes control tokens of the text {text!r:.80}: leave out what looks like one")
    return ids


def encode_segments(tokenizer: Any, segments: Sequence[str | int]) -> list[int]:
    """The ids of control pieces (ints) and texts in a row, as transformers' `sanitize_control_tokens` encodes them.

    What stands between two texts that pose as control pieces is encoded as a whole, so that without any the ids are
    those of the whole text. LlamaError where the vocabulary makes a control piece of other text.
    """
    specials = special_ids_of(tokenizer)
    names = {token: name for name, token in specials.items()}
    ids: list[int] = []
    for text, places in _pieces(segments, specials, names):
        if text:
            ids += _encode_piece(tokenizer, text, places, specials, first=not ids)
    return ids


def _pieces(
    segments: Sequence[str | int], specials: dict[str, int], names: dict[int, str]
) -> list[tuple[str, list[tuple[int, int]] | None]]:
    """The prompt cut where text poses as a control piece: (text, where in it which control pieces belong); None for
    the posing texts themselves, in which none belongs.
    """
    pattern = special_pattern(tuple(specials))
    pieces: list[tuple[str, list[tuple[int, int]] | None]] = []
    text, places = "", list[tuple[int, int]]()
    for segment in segments:
        if isinstance(segment, int):
            places.append((len(text), segment))
            text += names[segment]
            continue
        for i, part in enumerate(pattern.split(segment)):
            if i % 2 == 0:
                text += part
            else:
                pieces += [(text, places), (part, None)]
                text, places = "", []
    return [*pieces, (text, places)]


def _encode_piece(
    tokenizer: Any, text: str, places: list[tuple[int, int]] | None, specials: dict[str, int], first: bool
) -> list[int]:
    """The ids of one piece, among whose control pieces are exactly those of `places`; LlamaError where others are."""
    found = [(match.start(), specials[match.group()]) for match in special_pattern(tuple(specials)).finditer(text)]
    options: dict[str, Any] = {"bos": False, "eos": False, "specials": places is not None} if specials else {}
    ids = _encode(tokenizer, text, options) if first else _encode_later(tokenizer, text, options)
    wanted = [token for _, token in places or ()]
    control = set(specials.values()) - {specials.get("<unk>")}
    if (places is not None and found != places) or [token for token in ids if token in control] != wanted:
        raise LlamaError(
            f"the text {text!r:.80} cannot be kept apart from the control tokens in it: the vocabulary makes of it "
            f"others than the chat format put there; leave out what looks like {', '.join(list(specials)[:3])}"
        )
    return ids


def _encode(tokenizer: Any, text: str, options: dict[str, Any]) -> list[int]:
    return tokenizer.encode(text, **(options or {"bos": False, "eos": False}))  # type: ignore[no-any-return]


def _encode_later(tokenizer: Any, text: str, options: dict[str, Any]) -> list[int]:
    """The ids of a text that follows another: behind a newline, without SentencePiece's space before every text."""
    newline = _encode(tokenizer, "\n", options)
    ids = _encode(tokenizer, "\n" + text, options)
    return ids[len(newline) :] if ids[: len(newline)] == newline else _encode(tokenizer, text, options)
