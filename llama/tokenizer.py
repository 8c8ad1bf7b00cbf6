"""Text to ids and back: SentencePiece vocabularies, llama2.c's tokenizer.bin, and decoding while ids arrive."""

import codecs
import struct
import sys
from collections.abc import Iterator, Sequence
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

_MARK = "\x02"  # no vocabulary joins it to anything: it becomes byte tokens of its own


class Tokenizer:
    """A vocabulary with `n_words` ids; `bos_id`, `eos_id` and `pad_id` (-1 in Llama 2's) may be replaced.

    `model_path` is a SentencePiece model or a llama2.c tokenizer.bin. FileNotFoundError, or LlamaError that says what
    the file is instead.
    """

    def __init__(self, model_path: str) -> None:
        path = Path(model_path).expanduser().absolute()
        self.sp_model = sentencepiece.SentencePieceProcessor()
        self.sp_model.LoadFromSerializedProto(_read_vocabulary(path))
        self.n_words: int = self.sp_model.vocab_size()
        self.bos_id: int = self.sp_model.bos_id()
        self.eos_id: int | None = self.sp_model.eos_id()
        self.pad_id: int = self.sp_model.pad_id()

    def encode(self, s: str, bos: bool, eos: bool, *, prefix_space: bool = True) -> list[int]:
        """The ids of a text, between BOS and EOS where asked.

        SentencePiece puts a space before a text that begins with none; `prefix_space=False` leaves that out, for a
        text that goes on where another ended. LlamaError for what is no text.
        """
        if not isinstance(s, str):
            raise LlamaError(f"encode takes a str, got a {type(s).__name__}: {s!r:.60}")
        try:
            s.encode("utf-8")
        except UnicodeEncodeError as error:
            raise LlamaError(f"the text holds {s[error.start]!r} at place {error.start}, half a character") from error
        ids: list[int] = self.sp_model.encode(s if prefix_space else _MARK + s)
        if not prefix_space:
            ids = ids[len(self.sp_model.encode(_MARK)) :]
        tail = [] if not eos else [as_present(self.eos_id, "eos_id")]
        return ([self.bos_id] if bos else []) + ids + tail

    def decode(self, t: int | Sequence[int], *, keep_space: bool = False) -> str:
        """The text of a list of ids or of one. The space before the first word is dropped, as SentencePiece does,
        unless `keep_space`. LlamaError names an id out of range.
        """
        ids = [t] if hasattr(t, "__index__") else list(t)  # type: ignore[arg-type]
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.n_words:
                raise LlamaError(f"id {token} is not in the vocabulary, whose ids go from 0 to {self.n_words - 1}")
        if keep_space:
            decoder = StreamDecoder(self, keep_space=True)
            return "".join([decoder.put(token) for token in ids]) + decoder.end()
        return self.sp_model.decode(ids)  # type: ignore[no-any-return]


def as_present(token: int | None, name: str) -> int:
    if token is None:
        raise LlamaError(f"the tokenizer has no {name}")
    return token


class StreamDecoder:
    """Text of ids that arrive one by one; all pieces together are the text of all ids.

    `put` returns what is certain by now, `end` the rest: bytes that never became a character are U+FFFD. `keep_space`
    keeps the space before the first word. A tokenizer without `sp_model` needs `decode(list)` alone.
    """

    def __init__(self, tokenizer: Any, keep_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._pieces = getattr(tokenizer, "sp_model", None)
        if not isinstance(self._pieces, sentencepiece.SentencePieceProcessor):
            self._pieces = None
        self._at_start = not keep_space
        self._bytes = b""  # of a character that is not complete yet
        self._ids: list[int] = []  # for a tokenizer without pieces
        self._given = ""

    def put(self, token: int) -> str:
        if self._pieces is None:
            return self._put_anywhere(token)
        if self._pieces.is_byte(token):
            self._bytes += bytes([int(self._pieces.id_to_piece(token)[1:-1], 16)])
            text = self._take_characters()
        else:
            text = self.end()
            if not self._pieces.is_control(token):
                text += self._spell(token)
                self._at_start = False
        if self._pieces.is_byte(token):
            self._at_start = False
        return text

    def _spell(self, token: int) -> str:
        if self._pieces.is_unknown(token):
            return str(self._pieces.decode([token]))
        text: str = self._pieces.id_to_piece(token).replace("\u2581", " ")
        return text[1:] if self._at_start and text.startswith(" ") else text

    def _take_characters(self) -> str:
        """The characters that the held bytes are sure to be; a byte that can begin none is U+FFFD."""
        text = ""
        while self._bytes:
            size = next((n for n in range(1, len(self._bytes) + 1) if _is_character(self._bytes[:n])), 0)
            if size:
                text += self._bytes[:size].decode()
            elif _may_begin_character(self._bytes):
                break
            else:
                text, size = text + "\ufffd", 1
            self._bytes = self._bytes[size:]
        return text

    def _put_anywhere(self, token: int) -> str:
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._given = text[len(self._given) :], text
        return new

    def end(self) -> str:
        if self._pieces is None:
            text: str = self._tokenizer.decode(self._ids) if self._ids else ""
            new, self._given = text[len(self._given) :], text
            return new
        text = ""
        while self._bytes:  # each byte that cannot be read is one U+FFFD, as SentencePiece has it
            text, self._bytes = text + "\ufffd", self._bytes[1:]
            text += self._take_characters()
        return text


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def _may_begin_character(data: bytes) -> bool:
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data) == ""
    except UnicodeDecodeError:
        return False


# --------------------------------------------------------------------------------- reading the file


def _read_vocabulary(path: Path) -> bytes:
    """The SentencePiece model of a file, or an error that says what it is instead."""
    if not path.exists():
        raise FileNotFoundError(
            f"no tokenizer at {path}: give the path of the tokenizer.model that came with the weights"
        )
    if path.is_dir():
        raise LlamaError(f"{path} is a folder: give the path of the tokenizer.model in it")
    data = path.read_bytes()
    problem = _recognise(data)
    if problem is not None:
        raise LlamaError(f"{path} {problem}")
    try:
        return _from_llama2c(data)
    except (ValueError, struct.error):
        pass
    try:
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(data)
    except (RuntimeError, TypeError) as error:
        raise LlamaError(
            f"{path} ({len(data)} bytes) is neither a SentencePiece model nor a llama2.c tokenizer.bin: fetch it again"
        ) from error
    return data


def _recognise(data: bytes) -> str | None:
    """What a file is that is no vocabulary of ours, and what to do about it."""
    head = data[:512].lstrip().lower()
    if not data:
        return "is empty: fetch it again (the download stopped before its first byte)"
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is an HTML page, not a tokenizer: the download link has expired or needs a login; fetch it again"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself: run 'git lfs pull' in its folder"
    if head.startswith(b"{"):
        return "is a tokenizer.json (Hugging Face tokenizers); this library reads tokenizer.model, often beside it"
    first = data.split(b"\n", 1)[0].split()
    if len(first) == 2 and first[0] == b"IQ==" and first[1].isdigit():
        return "is a Llama 3 vocabulary (tiktoken); this library reads Llama 2's SentencePiece tokenizer.model"
    return None


def _entries(data: bytes) -> Iterator[tuple[float, bytes]]:
    """Score and bytes of each id of a tokenizer.bin; ValueError where the file is none."""
    (longest,) = struct.unpack_from("<i", data)
    place = 4
    while place < len(data):
        score, length = struct.unpack_from("<fi", data, place)
        place += 8
        if not 0 <= length <= longest or place + length > len(data):
            raise ValueError("not a tokenizer.bin")
        yield score, data[place : place + length]
        place += length


def _from_llama2c(data: bytes) -> bytes:
    """llama2.c's tokenizer.bin as a SentencePiece model (protobuf's wire format written by hand)."""
    entries = list(_entries(data))
    if len(entries) < 259 or entries[0][1] != b"<unk>":
        raise ValueError("not a tokenizer.bin")
    unknown, control, byte, normal = 2, 3, 6, 1
    pieces = b""
    for token, (score, text) in enumerate(entries):
        kind = unknown if token == 0 else control if token < 3 else byte if token < 259 else normal
        name = text.strip() if kind == control else text.replace(b" ", "\u2581".encode()) if kind == normal else text
        body = _field(1, name) + b"\x15" + struct.pack("<f", score) + _number(3, kind)
        pieces += _field(1, body)
    trainer = _number(3, 2) + _number(35, 1)  # model_type BPE, byte_fallback
    trainer += _number(40, 0) + _number(41, 1) + _number(42, 2) + _number(43, 2**64 - 1)  # unk, bos, eos, pad -1
    normalizer = _field(1, b"identity") + _number(3, 1) + _number(4, 0) + _number(5, 1)  # dummy prefix, spaces kept
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _field(tag: int, data: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(data)) + data
