"""What a SentencePiece model's bytes must be before SentencePiece, whose older versions trust them, is given them.

SentencePiece 0.2.0 follows a normalizer's table of characters without checks of bounds: one of 20 damaged models ended
the process. Field numbers are those of sentencepiece_model.proto.
"""

import math
import struct
from collections.abc import Iterator

MAX_PIECES = 1 << 20
MAX_TEXT = 1_000  # bytes of one piece, or of a setting; Llama's longest piece has 48
MAX_CHARSMAP = 1 << 20  # bytes; that of nmt_nfkc_cf, the largest of SentencePiece's own, has 300,000
MAX_EXPANSION = 100  # bytes that stand for one character; Unicode's longest (U+FDFA) needs 33
MAX_SELF_TEST = 1 << 16  # bytes of texts that are encoded each time the vocabulary is read
_UNIT = 256  # the table's ints come in blocks of this many


def check_proto(data: bytes) -> None:
    """ValueError, in words, for bytes that are no SentencePiece model or hold what no vocabulary needs."""
    n_pieces, unknown = 0, 0
    for tag, value in _fields(data):
        if tag == 1:
            n_pieces += 1
            unknown += _check_piece(_message(value), n_pieces - 1)
        elif tag == 2:
            _check_trainer(_message(value))
        elif tag in (3, 5):
            _check_normalizer(_message(value))
        elif tag == 4 and len(_message(value)) > MAX_SELF_TEST:
            raise ValueError(f"{len(_message(value))} bytes of self-test")
    if not 1 <= n_pieces <= MAX_PIECES or unknown != 1:
        raise ValueError(f"{n_pieces} pieces, {unknown} of them for what is unknown")


def _check_piece(data: bytes, token: int) -> bool:
    """Whether the piece is the unknown one."""
    text, score, kind = b"", 0.0, 1
    for tag, value in _fields(data):
        if tag == 1:
            text = _message(value)
        elif tag == 2:
            score = struct.unpack("<f", value)[0] if isinstance(value, bytes) and len(value) == 4 else math.nan
        elif tag == 3:
            kind = value if isinstance(value, int) else 0
    if not 0 < len(text) <= MAX_TEXT or b"\0" in text or not math.isfinite(score) or not 1 <= kind <= 6:
        raise ValueError(f"a piece that makes no sense at id {token}")
    return kind == 2


def _check_trainer(data: bytes) -> None:
    for tag, value in _fields(data):
        if tag == 3 and value not in (1, 2, 3, 4):
            raise ValueError(f"model_type {value!r:.40}")
        if isinstance(value, bytes) and tag in range(44, 50) and len(value) > MAX_TEXT:
            raise ValueError(f"{len(value)} bytes of a setting")
        if tag in range(40, 44) and not (isinstance(value, int) and (value < MAX_PIECES or value >= 2**64 - 2**31)):
            raise ValueError(f"the special id {value!r:.40}")


def _check_normalizer(data: bytes) -> None:
    for tag, value in _fields(data):
        if tag == 2 and value != b"":
            _check_charsmap(_message(value))


def _check_charsmap(blob: bytes) -> None:
    """A double array (Darts-clone) behind its length, then the texts that its values point into, each ending in NUL."""
    size = int.from_bytes(blob[:4], "little")
    texts = blob[4 + size :]
    if len(blob) > MAX_CHARSMAP or size < 4 * _UNIT or size % (4 * _UNIT) or not texts.endswith(b"\0"):
        raise ValueError(f"a table of characters of {size} in {len(blob)} bytes")
    texts.decode("utf-8")
    if max(map(len, texts.split(b"\0"))) > MAX_EXPANSION:
        raise ValueError(f"a character that becomes more than {MAX_EXPANSION} bytes")
    units = struct.unpack(f"<{size // 4}I", blob[4 : 4 + size])
    for place, unit in enumerate(units):
        if unit >> 31:  # a value, which no byte leads to
            continue
        target = place ^ (unit >> 10) << ((unit & 0x200) >> 6)  # the node's children are within its block of 256
        if target >= len(units):
            raise ValueError("a table of characters that leads out of itself")
        if unit & 0x100 and units[target] & 0x7FFFFFFF >= len(texts):
            raise ValueError("a table of characters that points behind its texts")


# ------------------------------------------------------------------------------------- protobuf's wire format


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a text or a message belongs")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field: an int where it is one of any length, else bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind, size = key & 7, 0
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        if kind not in (1, 2, 5) or size > len(data) - place or key >> 3 == 0:
            raise ValueError(f"no protobuf at byte {place}")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """An int of up to 64 bits, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place == len(data):
            break
        byte, place = data[place], place + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), place
    raise ValueError(f"a number that does not end at byte {place}")
