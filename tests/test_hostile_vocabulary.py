"""Vocabularies that older versions of sentencepiece would follow out of their memory: refused before it sees them."""

import io
import struct
from pathlib import Path

import mutations
import pytest
import sentencepiece

from llama import Tokenizer
from llama.checkpoint.companions import read_vocabulary
from llama.errors import LlamaError
from llama.vocabulary.proto_check import check_proto

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo" / "tokenizer.model"
TEXTS = ["Hello w\u00f6rld", "\uff3bINST\uff3d \u00bd \ufb01 caf\u00e9", "\u4f60\u597d"]


def field(tag: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return mutations._as_varint(tag << 3) + mutations._as_varint(value)
    return mutations._as_varint(tag << 3 | 2) + mutations._as_varint(len(value)) + value


@pytest.fixture(scope="module")
def charsmap() -> bytes:
    """SentencePiece's own of nmt_nfkc."""
    model, lines = io.BytesIO(), (["some words of a text", "and others of it"] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=5
    )
    check_proto(model.getvalue())
    data = model.getvalue()
    start = data.index(b"\x12", data.index(b"nmt_nfkc") + 8) + 1
    length, start = mutations._varint(data, start)
    return data[start : start + length]


def units(value: int, count: int = 1024, size: int | None = None) -> bytes:
    return struct.pack("<I", 4 * count if size is None else size) + struct.pack("<I", value) * count


BROKEN = {
    "a table of random bytes": bytes(range(256)) * 20,
    "longer than it is": units(0, size=1 << 31) + b"a\0",
    "no length in blocks": units(0, 1025) + b"a\0",
    "leads out of itself": units(0x7FFFFC00) + b"a\0",
    "leads far out of itself": units(0x7FFFFE00) + b"a\0",
    "points behind its texts": units(0x100)[:-4] + struct.pack("<I", 0x7FFFFFFF) + b"a\0",
    "texts without an end": units(0) + b"abc",
    "no texts": units(0),
    "one character becomes 200 bytes": units(0) + b"a" * 200 + b"\0",
    "texts that are not UTF-8": units(0) + b"\xff\0",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("tag", [3, 5])
def test_a_broken_table_of_characters(tmp_path: Path, name: str, tag: int) -> None:
    table = BROKEN[name]
    if name.startswith("points"):  # every node is a leaf's parent, whose value is the last one
        table = struct.pack("<I", 4096) + struct.pack("<1024I", *[0x100 | 1 << 10] * 1024) + b"a\0"
    path = tmp_path / "tokenizer.model"
    path.write_bytes(DEMO.read_bytes() + field(tag, field(2, table)))
    with pytest.raises(LlamaError, match="neither a whole SentencePiece model"):
        Tokenizer(str(path))
    assert read_vocabulary(path) is None  # `convert` asks this one


def test_a_whole_table_of_characters(tmp_path: Path, charsmap: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(DEMO.read_bytes() + field(3, field(2, charsmap)))
    tokenizer = Tokenizer(str(path))
    assert tokenizer.encode(TEXTS[1], False, False) == tokenizer.encode("[INST] 1\u20442 fi caf\u00e9", False, False)


PIECES = {
    "a score that is no number": field(1, b"abc") + b"\x15" + struct.pack("<f", float("nan")),
    "an endless score": field(1, b"abc") + b"\x15" + struct.pack("<f", float("inf")),
    "a type that there is not": field(1, b"abc") + field(3, 7),
    "no text": field(3, 1),
    "a long text": field(1, b"a" * 1001),
    "a second unknown": field(1, b"abc") + field(3, 2),
    "a number for a text": field(1, 5),
    "a NUL": field(1, b"a\0b"),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_that_makes_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match="piece|number"):
        check_proto(DEMO.read_bytes() + field(1, PIECES[name]))


@pytest.mark.parametrize(
    "more",
    [
        *(field(4, b"x" * 70_000), field(2, field(3, 9)), field(2, field(40, 1 << 40)), field(2, field(45, b"x" * 2000))),
        *(b"\x0b", b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 11, b"\x0d\0", b"\x02\x01a", field(1, 3), field(3, 3)),
    ],
)  # fmt: skip
def test_fields_that_no_vocabulary_has(more: bytes) -> None:
    check_proto(DEMO.read_bytes())
    with pytest.raises(ValueError, match=r"\w"):
        check_proto(DEMO.read_bytes() + more)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.proof)])
def test_damaged_tables_are_refused_or_read(tmp_path: Path, charsmap: bytes, count: int) -> None:
    """Every one that passes is used; SentencePiece 0.2.0 dies of most of the others."""
    rng, path, read = mutations.Dice(12), tmp_path / "tokenizer.model", 0
    for _ in range(count):
        table = bytearray(charsmap)
        for _ in range(rng.choice([1, 3, 100])):
            table[rng.choice([rng.randrange(len(table)), rng.randrange(4, 1028)])] = rng.randrange(256)
        path.write_bytes(DEMO.read_bytes() + field(3, field(2, bytes(table))))
        try:
            tokenizer = Tokenizer(str(path))
        except LlamaError:
            continue
        read += 1
        for text in TEXTS:
            assert isinstance(tokenizer.decode(tokenizer.encode(text, False, False)), str)
    assert 0 < read < count
