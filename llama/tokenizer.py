"""Text to ids and back: SentencePiece vocabularies, llama2.c's tokenizer.bin, and decoding while ids arrive."""

import logging
import math
import re
import struct
import sys
from collections.abc import Iterator
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

try:
    import sentencepiece
except ImportError as error:
    raise ImportError(
        f"llama needs the package sentencepiece, which {sys.executable} cannot import ({error}); "
        f"install it with: {sys.executable} -m pip install sentencepiece"
    ) from error

from .errors import LlamaError
from .proto_check import check_proto

logger = logging.getLogger("llama")
SentencePieceProcessor: Any = sentencepiece.SentencePieceProcessor  # programs look for it here


class Tokenizer:
    """A vocabulary with `n_words` ids; `bos_id`, `eos_id` and `pad_id` (-1 in Llama 2's) may be replaced.

    `model_path` is a SentencePiece model or a llama2.c tokenizer.bin. FileNotFoundError, or LlamaError that says what
    the file is instead.
    """

    def __init__(self, model_path: str) -> None:
        self.sp_model: Any = _read_vocabulary(Path(model_path).expanduser().absolute())
        self.n_words: int = self.sp_model.vocab_size()
        self.bos_id: int = self.sp_model.bos_id()
        self.eos_id: int | None = self.sp_model.eos_id()
        self.pad_id: int = self.sp_model.pad_id()

    @property
    def stop_ids(self) -> set[int]:
        """The ids that end a text: `eos_id` as it is now, none where it is None."""
        return set() if self.eos_id is None else {self.eos_id}

    def encode(self, s: str, bos: bool, eos: bool, *, prefix_space: bool = True) -> list[int]:
        """The ids of a text, between BOS and EOS where asked; "</s>" in the text is text, never EOS.

        SentencePiece puts a space before every text; `prefix_space=False` leaves it out, for a text that goes on where
        another ended. LlamaError for what is no text.
        """
        if not isinstance(s, str):
            raise LlamaError(f"encode takes a str, got a {type(s).__name__}: {s!r:.60}")
        try:
            s.encode("utf-8")
        except UnicodeEncodeError as error:
            raise LlamaError(
                f"the text holds {s[error.start]!r} at place {error.start}: half a character (a lone surrogate), "
                f"which UTF-8 cannot write; text.encode('utf-8', 'replace').decode() puts '?' there"
            ) from error
        ids: list[int] = (self.sp_model if prefix_space else self._continuing).encode(s)
        return ([self._mark("bos_id")] if bos else []) + ids + ([self._mark("eos_id")] if eos else [])

    @cached_property
    def _continuing(self) -> Any:
        """The same vocabulary without the space before every text: of a field given twice, protobuf takes the last."""
        no_dummy_prefix = _field(3, _number(3, 0))
        return _processor(self.sp_model.serialized_model_proto() + no_dummy_prefix)

    def _mark(self, name: str) -> Any:
        """BOS or EOS; None, as published, where the caller has taken it away."""
        token: int | None = getattr(self, name)
        if token is not None and token < 0:
            raise LlamaError(f"the tokenizer has no {name[:3].upper()}: its {name} is {token}; set it, or ask for none")
        return token

    def decode(self, t: Any, *, keep_space: bool = False) -> Any:
        """The text of a list of ids or of one; lists of ids give a list of texts, None an empty text; tensors are good.

        The space before the first word is dropped, as SentencePiece does, unless `keep_space`. LlamaError names an id
        out of range.
        """
        t = t.tolist() if hasattr(t, "tolist") else t
        if isinstance(t, (list, tuple)) and t and all(_is_list(ids) for ids in t):
            return [self.decode(ids, keep_space=keep_space) for ids in t]
        ids = [] if t is None else _as_ids(t)
        for token in ids:
            if not 0 <= token < self.n_words:
                raise LlamaError(f"id {token} is not in the vocabulary, whose ids go from 0 to {self.n_words - 1}")
        if not keep_space:
            return self.sp_model.decode(ids)
        before = [self.sp_model.unk_id()]  # any word would do: the space is dropped at the very start only
        return self.sp_model.decode(before + ids)[len(self.sp_model.decode(before)) :]


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that end a text, as they are now; a tokenizer of the caller's may have nothing but an `eos_id`."""
    ids = getattr(tokenizer, "stop_ids", None)
    if ids is None:
        ids = [] if getattr(tokenizer, "eos_id", None) is None else [tokenizer.eos_id]
    return frozenset(ids)


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


# --------------------------------------------------------------------------------- reading the file

_LARGEST = 2**24  # bytes; Llama 2's vocabulary has half a million


def _read_vocabulary(path: Path) -> Any:
    """The SentencePiece processor of a file, or an error that says what the file is instead."""
    if not path.exists():
        raise FileNotFoundError(
            f"no tokenizer at {path}: give the path of the tokenizer.model that came with the weights"
        )
    if not path.is_file():
        raise LlamaError(f"{path} is a folder or a device: give the path of the tokenizer.model in it")
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise LlamaError(
            f"{path} cannot be read ({error.strerror}): give a tokenizer.model that you may read"
        ) from error
    problem = _recognise(data) if len(data) <= _LARGEST else f"has more than {_LARGEST} bytes: no vocabulary of Llama's"
    if problem is not None:
        raise LlamaError(f"{path} {problem}")
    try:
        proto = _from_llama2c(data) if data[8:17] == b"\5\0\0\0<unk>" else data
        check_proto(proto)
        return _processor(proto)
    except Exception as error:  # SentencePiece's own errors have no common class
        found = error if isinstance(error, ValueError) else f"{len(data)} bytes that SentencePiece cannot read"
        raise LlamaError(
            f"{path} is neither a whole SentencePiece model nor a whole llama2.c tokenizer.bin ({found}): "
            f"fetch it again, or give the path of the tokenizer.model that came with the weights"
        ) from error


def _processor(proto: bytes) -> Any:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto)
    processor.id_to_piece(list(range(processor.vocab_size())))  # UnicodeDecodeError here, not in the middle of a text
    return processor


def _recognise(data: bytes) -> str | None:
    """What a file is that is no vocabulary of ours, and what to do about it."""
    head = data[:512].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if not data:
        return "is empty: fetch it again (the download stopped before its first byte)"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself: run 'git lfs pull' in its folder"
    if head.startswith(b"<") and b"\0" not in head:
        return "is an HTML page, not a tokenizer: the download link has expired or needs a login; fetch it again"
    if head.startswith(b"{") and b"\0" not in head:
        return "is JSON, such as Hugging Face's tokenizer.json: give the tokenizer.model, which often lies beside it"
    if re.match(rb"[a-z0-9+/]+=* \d+\r?\n", head):
        return "is a Llama 3 vocabulary (tiktoken): give the SentencePiece tokenizer.model that a Llama 2 model has"
    return None


# ---------------------------------------------------------------------- llama2.c's tokenizer.bin


def _entries(data: bytes) -> Iterator[tuple[float, bytes]]:
    """Score and bytes of each id of a tokenizer.bin; ValueError where it is cut or broken."""
    token, place = 0, 4
    while place < len(data):
        head, place = data[place : place + 8], place + 8
        score, length = struct.unpack("<fi", head) if len(head) == 8 else (math.nan, 0)
        if not (math.isfinite(score) and 0 < length <= len(data) - place):
            raise ValueError(f"a tokenizer.bin that breaks off or makes no sense at id {token}")
        yield score, data[place : place + length]
        token, place = token + 1, place + length


def _from_llama2c(data: bytes) -> bytes:
    """llama2.c's tokenizer.bin as a SentencePiece BPE model, in protobuf's wire format (sentencepiece_model.proto)."""
    pieces = []
    for token, (score, text) in enumerate(_entries(data)):
        kind = 2 if token == 0 else 3 if token < 3 else 6 if token < 259 else 1  # unknown, control, byte, normal
        name = text.strip() if kind == 3 else text.decode().replace(" ", "\u2581").encode()
        pieces.append(_field(1, _field(1, name) + b"\x15" + struct.pack("<f", score) + _number(3, kind)))
    trainer = _number(3, 2) + _number(35, 1)  # BPE, byte_fallback
    trainer += _number(40, 0) + _number(41, 1) + _number(42, 2) + _number(43, 2**64 - 1)  # unk, bos, eos, pad -1
    normalizer = _field(1, b"identity") + _number(3, 1) + _number(4, 0) + _number(5, 1)  # dummy prefix, spaces kept
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _field(tag: int, data: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(data)) + data
