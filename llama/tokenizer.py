"""Text to ids and back, and decoding while ids arrive; what a vocabulary's file is, `vocabulary/` finds out."""

import logging
import os
from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Self, Unpack

from .errors import LlamaError
from .vocabulary import SentencePieceProcessor, Vocabulary, make_vocabulary, read_file

__all__ = ["SentencePieceProcessor", "StreamDecoder", "Tokenizer", "ids_without_piece", "piece", "stop_ids"]

logger = logging.getLogger("llama")


class Facts(TypedDict, total=False):
    """What the files beside a vocabulary say of it; None is as if they did not."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    stop_ids: Iterable[int]  # that end a text, beside `eos_id`
    add_bos: bool | None
    added: Mapping[str, int]  # tokens behind the pieces of a SentencePiece model
    legacy: bool  # transformers' word: a space before the text behind every special token, not only before the first


class Tokenizer:
    """A vocabulary with `n_words` ids; `bos_id`, `eos_id` and `pad_id` (-1 in Llama 2's) may be replaced.

    `model_path` is a SentencePiece model, Llama 3's tiktoken file, a tokenizer.json or a llama2.c tokenizer.bin.
    `special_ids` are the control pieces by their text. FileNotFoundError, or LlamaError that says what the file is
    instead, or which package it needs.
    """

    def __init__(self, model_path: str) -> None:
        path = Path(os.path.expanduser(model_path)).absolute()  # "~name" stays where there is no such user
        self._take(read_file(path), path, {})

    @classmethod
    def from_bytes(cls, data: bytes, origin: Path, **facts: Unpack[Facts]) -> Self:
        """The tokenizer of a file in memory, with what is known beside it; errors name `origin`."""
        tokenizer = cls.__new__(cls)
        tokenizer._take(data, origin, facts)
        return tokenizer

    def _take(self, data: bytes, origin: Path, facts: Facts) -> None:
        vocabulary = make_vocabulary(data, origin, facts.get("added"), facts.get("legacy", False))
        self.vocabulary: Vocabulary = vocabulary
        self.sp_model: Any = getattr(vocabulary, "sp_model", None)  # SentencePiece's own, where it is that
        self.n_words: int = vocabulary.n_words
        self.n_rows: int = vocabulary.n_words  # of the model's embedding; ids from n_words up have no piece
        self.special_ids: dict[str, int] = dict(vocabulary.special_ids)
        self.bos_id: int = vocabulary.bos_id
        self.pad_id: int = vocabulary.pad_id
        self.add_bos: bool = vocabulary.add_bos  # whether `bos=True` puts it there
        self._stop_ids = set(vocabulary.stop_ids)
        self._eos_id: int | None = None
        self.eos_id = vocabulary.eos_id
        self.take_facts(origin, facts)

    def take_facts(self, origin: Path, facts: Facts) -> None:
        """Follow what the files beside the vocabulary say; LlamaError for an id that it does not have."""
        for name in ("bos_id", "eos_id", "pad_id"):
            token = facts.get(name)
            if token is None:
                continue
            if type(token) is not int or not -1 <= token < self.n_words:
                raise LlamaError(f"{origin}: {name} {token!r:.40} is none of the ids 0 to {self.n_words - 1}")
            setattr(self, name, token)
        if facts.get("add_bos") is not None:
            self.add_bos = bool(facts["add_bos"])
        self._stop_ids |= set(facts.get("stop_ids") or ())

    @property
    def eos_id(self) -> int | None:
        """The id that `encode` puts behind a text; one of `stop_ids`. None: nothing ends a text but the others."""
        return self._eos_id

    @eos_id.setter
    def eos_id(self, token: int | None) -> None:
        self._stop_ids = (self._stop_ids - {self._eos_id}) | ({token} if token is not None and token >= 0 else set())
        self._eos_id = token

    @property
    def stop_ids(self) -> set[int]:
        """The ids that end a text: `eos_id` as it is now, and those that the files name beside it."""
        return self._stop_ids

    @stop_ids.setter
    def stop_ids(self, ids: Iterable[int]) -> None:
        self._stop_ids = set(ids)

    def encode(self, s: str, bos: bool, eos: bool, *, prefix_space: bool = True, specials: bool = False) -> list[int]:
        """The ids of a text, between BOS and EOS where asked (BOS only where the checkpoint's files want it at all).

        "</s>" in the text is text, never EOS, unless `specials`. SentencePiece puts a space before every text;
        `prefix_space=False` leaves it out, for a text that goes on where another ended. LlamaError for what is no text.
        """
        if not isinstance(s, str):
            raise LlamaError(f"encode takes a str, got a {type(s).__name__}: {s!r:.60}")
        ids = self.vocabulary.encode(s, prefix_space=prefix_space, specials=specials)
        first = [self._mark("bos_id")] if bos and self.add_bos else []
        return first + ids + ([self._mark("eos_id")] if eos else [])

    def _mark(self, name: str) -> Any:
        """BOS or EOS; None, as published, where the caller has taken it away."""
        token: int | None = getattr(self, name)
        if token is not None and token < 0:
            raise LlamaError(f"the tokenizer has no {name[:3].upper()}: its {name} is {token}; set it, or ask for none")
        return token

    def decode(self, t: Any, *, keep_space: bool = False) -> Any:
        """The text of a list of ids or of one; lists of ids give a list of texts, None an empty text; tensors are good.

        The space before the first word is dropped, as SentencePiece does, unless `keep_space`. An id of the model's
        without a piece is no text. LlamaError names an id out of range.
        """
        t = t.tolist() if hasattr(t, "tolist") else t
        if isinstance(t, (list, tuple)) and t and all(_is_list(ids) for ids in t):
            return [self.decode(ids, keep_space=keep_space) for ids in t]
        ids = [] if t is None else _as_ids(t)
        last = max(self.n_rows, self.n_words) - 1
        for token in ids:
            if not 0 <= token <= last:
                raise LlamaError(f"id {token} is not in the vocabulary, whose ids go from 0 to {last}")
        if last >= self.n_words:
            ids = [token for token in ids if token < self.n_words]
        return self.vocabulary.decode(ids, keep_space=keep_space)


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that end a text, as they are now; a tokenizer of the caller's may have nothing but an `eos_id`."""
    ids = getattr(tokenizer, "stop_ids", None)
    if ids is None:
        ids = [] if getattr(tokenizer, "eos_id", None) is None else [tokenizer.eos_id]
    return frozenset(ids)


def ids_without_piece(tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The ids of a model's vocabulary that no text has: holes of the tokenizer's, and rows behind its last piece."""
    n_words = getattr(tokenizer, "n_words", None)
    if type(n_words) is not int or n_words < 1 or not isinstance(vocab_size, int):
        return ()
    holes = getattr(getattr(tokenizer, "vocabulary", None), "holes", ())
    return (*sorted(token for token in holes if token < vocab_size), *range(n_words, vocab_size))


def piece(tokenizer: Any, token: int) -> str:
    """A vocabulary entry with its leading space; `<s>` and byte tokens such as `<0x0A>` by name. A tokenizer of the
    caller's that names no pieces shows what it decodes to.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.vocabulary.piece(token) if token < tokenizer.n_words else ""
    named = getattr(getattr(tokenizer, "sp_model", None), "id_to_piece", None)
    if named is not None:
        return str(named(token)).replace("\u2581", " ")
    return str(tokenizer.decode([token]))


def _is_list(ids: Any) -> bool:
    return isinstance(ids, (list, tuple)) or getattr(ids, "ndim", 0) > 0


def _as_ids(t: Any) -> list[int]:
    """One int or any iterable of ints (a tensor too) as a list."""
    try:
        return [index(t)]
    except TypeError:
        pass
    try:
        return [index(token) for token in t]
    except TypeError as error:
        raise LlamaError(f"decode takes an id or a list of ids, got {t!r:.60}") from error


LONGEST_CHARACTER = 4  # bytes of UTF-8, and so tokens at most


class StreamDecoder:
    """The text of ids that arrive one by one; joined, all pieces are `tokenizer.decode` of all ids.

    `put` returns what is certain by now, `end` the rest. `keep_space` keeps the space before the first word. Takes any
    tokenizer with a `decode(list)` that writes an incomplete character as U+FFFD. A token costs the decoding of a few.
    """

    def __init__(self, tokenizer: Any, keep_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_space = keep_space
        self._window: list[int] = []  # ids whose text is out, then the ones held back
        self._known = 0  # how many of them are out
        self._given = 0  # length of the known ones' text, decoded alone
        self._started = False
        self.lead = ""  # the space that `decode` drops, once the text has begun

    def put(self, token: int) -> str:
        """Take the next id; the text that is certain by now, which may be none. Errors are those of `decode`."""
        window = [*self._window, token]
        text: str = self._tokenizer.decode(window)
        self._window = window  # only now: an id that cannot be decoded leaves no trace
        if text.endswith("\ufffd"):  # perhaps the first bytes of a character
            return self._give_certain(text) if len(window) - self._known > 2 * LONGEST_CHARACTER else ""
        return self._give(text) if len(text) > self._given else ""

    def end(self) -> str:
        """What was held back, now that no more ids come."""
        return self._give(self._tokenizer.decode(self._window)) if self._window else ""

    def _give_certain(self, text: str) -> str:
        """Of a window whose end is not certain, the part before its last bytes: ids that no later byte can change."""
        window = self._window
        for end in range(len(window) - LONGEST_CHARACTER, len(window) - 2 * LONGEST_CHARACTER, -1):
            start: str = self._tokenizer.decode(window[:end])
            if text.startswith(start):  # so it ends between two characters
                self._window = window[:end]
                new = self._give(start)
                self._window += window[end:]
                return new
        return ""

    def _give(self, text: str) -> str:
        """The new part of the window's text; then only the ids that it came from stay, as what the next ones follow."""
        new = text[self._given :]
        if not self._started:
            self._started, self.lead = True, self._dropped(text)
            new = (self.lead if self._keep_space else "") + new
        fresh = self._window[self._known :]
        if alone := self._tokenizer.decode(fresh) if fresh else "":
            self._window, self._known, self._given = fresh, len(fresh), len(alone)
        else:  # they show nothing by themselves, so the next ids would lose their space after them
            self._given = len(text)
        return new

    def _dropped(self, text: str) -> str:
        """The space the first ids would begin with, did they not stand first: seen where they follow themselves."""
        again: str = self._tokenizer.decode(self._window * 2)[len(text) :]
        lead = again.removesuffix(text)
        return lead if lead.isspace() else ""
