"""SentencePiece's tokenizer.model, with what a fine-tune added to it, and llama2.c's tokenizer.bin."""

import math
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

try:
    import sentencepiece
except ImportError as error:
    raise ImportError(
        f"llama needs the package sentencepiece, which {sys.executable} cannot import ({error}); "
        f"install it with: {sys.executable} -m pip install sentencepiece"
    ) from error

from .base import LARGEST_ID, TAG, check_utf8, split_at
from .proto_check import check_proto

SentencePieceProcessor: Any = sentencepiece.SentencePieceProcessor
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces in sentencepiece_model.proto


class SentencePieceVocabulary:
    """A SentencePiece model, or a tokenizer.bin made into one; `added` are tokens that stand behind its pieces.

    ValueError, or an error of SentencePiece's, for bytes that are neither.
    """

    kind = "SentencePiece"
    stop_ids: frozenset[int] = frozenset()
    add_bos = True

    def __init__(self, data: bytes, added: Mapping[str, int] | None = None, legacy: bool = False) -> None:
        proto = from_llama2c(data) if data[8:17] == b"\5\0\0\0<unk>" else data
        check_proto(proto)
        self.sp_model: Any = _processor(proto)
        self.bos_id: int = self.sp_model.bos_id()
        self.eos_id: int = self.sp_model.eos_id()
        self.pad_id: int = self.sp_model.pad_id()
        self._legacy = legacy  # a space before the text behind every special token, not only before the first
        self._size: int = self.sp_model.vocab_size()
        self._added = {text: token for text, token in (added or {}).items() if self._size <= token < LARGEST_ID}
        self._words = {text: token for text, token in self._added.items() if not TAG.fullmatch(text)}
        self._texts = {token: text for text, token in self._words.items()}
        self.n_words: int = max([self._size - 1, *self._added.values()]) + 1
        self.holes = frozenset(range(self._size, self.n_words)) - frozenset(self._added.values())
        controls = (i for i in range(self._size) if self.sp_model.is_control(i))
        self.special_ids: dict[str, int] = {self.sp_model.id_to_piece(i): i for i in controls}
        self.special_ids |= {text: token for text, token in self._added.items() if text not in self._words}

    def encode(self, text: str, *, prefix_space: bool = True, specials: bool = False) -> list[int]:
        """As `Vocabulary.encode`; a space is put before the text unless `prefix_space` is False."""
        check_utf8(text)
        ids: list[int] = []
        for place, part in enumerate(split_at(text, {**self._words, **(self.special_ids if specials else {})})):
            if isinstance(part, int):
                ids.append(part)
            else:
                with_space = prefix_space and (place == 0 or self._legacy)
                ids += (self.sp_model if with_space else self._continuing).encode(part)
        return ids

    @cached_property
    def _continuing(self) -> Any:
        """The same vocabulary without the space before every text: of a field given twice, protobuf takes the last."""
        no_dummy_prefix = field(3, number(3, 0))
        return _processor(self.sp_model.serialized_model_proto() + no_dummy_prefix)

    def decode(self, ids: list[int], *, keep_space: bool = False) -> str:
        """As `Vocabulary.decode`; control pieces are no text."""
        if not self._added:
            return self._decode(ids, keep_space)
        text, run = "", list[int]()
        for token in ids:
            if token < self._size:
                run.append(token)
            elif token in self._texts:
                text += self._decode(run, keep_space or text) + self._texts[token]
                run = []
        return text + self._decode(run, keep_space or text)

    def _decode(self, ids: list[int], keep_space: Any) -> str:
        if not keep_space:
            return self.sp_model.decode(ids)  # type: ignore[no-any-return]
        before = [self.sp_model.unk_id()]  # any word would do: the space is dropped at the very start only
        return self.sp_model.decode(before + ids)[len(self.sp_model.decode(before)) :]  # type: ignore[no-any-return]

    def piece(self, token: int) -> str:
        """As `Vocabulary.piece`; `<s>` and byte pieces by name."""
        if token >= self._size:
            return next((text for text, added in self._added.items() if added == token), "")
        return str(self.sp_model.id_to_piece(token)).replace("\u2581", " ")


def _processor(proto: bytes) -> Any:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto)
    processor.id_to_piece(list(range(processor.vocab_size())))  # UnicodeDecodeError here, not in the middle of a text
    return processor


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


def from_llama2c(data: bytes) -> bytes:
    """llama2.c's tokenizer.bin as a SentencePiece BPE model; ValueError where it is cut or broken."""
    return bpe_proto(
        (
            text.strip() if kind == CONTROL else text.decode().replace(" ", "\u2581").encode(),
            score,
            kind,
        )
        for token, (score, text) in enumerate(_entries(data))
        for kind in [UNKNOWN if token == 0 else CONTROL if token < 3 else BYTE if token < 259 else NORMAL]
    )


# ------------------------------------------------- protobuf's wire format (sentencepiece_model.proto)


def bpe_proto(
    pieces: Iterable[tuple[bytes, float, int]],
    *,
    unk_id: int = 0,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = -1,
    add_dummy_prefix: bool = True,
) -> bytes:
    """A SentencePiece BPE model with byte fallback, of each id's text (UTF-8, ▁ for a space), score and type; texts
    are not normalized, and spaces stay.
    """
    entries = [
        field(1, field(1, name) + b"\x15" + struct.pack("<f", score) + number(3, kind)) for name, score, kind in pieces
    ]
    trainer = number(3, 2) + number(35, 1)  # BPE, byte_fallback
    ids = (unk_id, bos_id, eos_id, pad_id)
    trainer += b"".join(number(tag, token % 2**64) for tag, token in zip(range(40, 44), ids, strict=True))
    normalizer = field(1, b"identity") + number(3, int(add_dummy_prefix)) + number(4, 0) + number(5, 1)  # spaces kept
    return b"".join(entries) + field(2, trainer) + field(3, normalizer)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def number(tag: int, value: int) -> bytes:
    """A field of protobuf's that holds an integer."""
    return _varint(tag << 3) + _varint(value)


def field(tag: int, data: bytes) -> bytes:
    """A field of protobuf's that holds bytes: a text or a message."""
    return _varint(tag << 3 | 2) + _varint(len(data)) + data
