"""Small vocabularies of every kind, made by hand: SentencePiece, tiktoken, tokenizer.json of both kinds of BPE."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama.vocabulary.hf import byte_alphabet
from llama.vocabulary.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, bpe_proto

WORDS = [
    "river",
    " river",
    "the",
    " the",
    "ing",
    " cold",
    "日本",
    "🙂",
    "é",
    "\n\n",
    "  ",
    "    ",
    "st",
    "one",
    " stone",
]


def merged(words: list[str]) -> list[bytes]:
    """256 single bytes, then every beginning of the words that is not there yet: each is the last and one byte more."""
    pieces = [bytes([byte]) for byte in range(256)]
    for word in words:
        data = word.encode()
        pieces += [data[:n] for n in range(2, len(data) + 1) if data[:n] not in pieces]
    return pieces


def tiktoken_file(pieces: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))


def added(content: str, token: int, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": special, **flags}


def byte_level(pieces: list[bytes], specials: list[str], **changes: Any) -> dict[str, Any]:
    """A tokenizer.json as SmolLM2's: special tokens first, GPT-2's pattern."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    names = ["".join(letters[byte] for byte in piece) for piece in pieces]
    vocab = {name: i for i, name in enumerate([*specials, *names])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
        "added_tokens": [added(name, i) for i, name in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [[name[:-1], name[-1]] for name in names if len(name) > 1]},
        **changes,
    }  # fmt: skip


def fallback(scheme: str, pieces: list[str], specials: list[str] | None = None) -> dict[str, Any]:
    """A tokenizer.json as Llama 2's: `scheme` "prepend" as transformers 4 wrote it, else Metaspace's, as 5 does."""
    specials = specials or ["<unk>", "<s>", "</s>"]
    vocab = {name: i for i, name in enumerate([*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    prepend = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    decoder = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    return {
        "version": "1.0",
        "added_tokens": [added(name, i) for i, name in enumerate(specials)],
        "normalizer": {"type": "Sequence", "normalizers": prepend} if scheme == "prepend" else None,
        "pre_tokenizer": None if scheme == "prepend" else space,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [*decoder, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        },
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": "<unk>",
            "vocab": vocab,
            "merges": [
                [name[:n], name[n:]]
                for name in pieces
                for n in range(1, len(name))
                if name[:n] in vocab and name[n:] in vocab
            ],
        },
    }


def letters_first(words: list[str]) -> list[str]:
    """Pieces for BPE over characters: the letters, then every beginning of the words."""
    words = [word.replace(" ", "▁") for word in words]
    pieces = sorted({letter for word in words for letter in word} | {"▁"})
    for word in words:
        pieces += [word[:n] for n in range(2, len(word) + 1) if word[:n] not in pieces]
    return pieces


def sentencepiece_twin(pieces: list[str]) -> bytes:
    """The same vocabulary as a SentencePiece model."""
    entries = [(b"<unk>", 0.0, UNKNOWN), (b"<s>", 0.0, CONTROL), (b"</s>", 0.0, CONTROL)]
    entries += [(f"<0x{byte:02X}>".encode(), 0.0, BYTE) for byte in range(256)]
    return bpe_proto([*entries, *((name.encode(), -float(i), NORMAL) for i, name in enumerate(pieces))])


def write(path: Path, content: Any) -> str:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MAKERS: dict[str, Callable[[], Any]] = {
    "sentencepiece": lambda: sentencepiece_twin(letters_first(WORDS)),
    "tiktoken": lambda: tiktoken_file(merged(WORDS)),
    "byte-level": lambda: byte_level(merged(WORDS), CHATML),
    "fallback": lambda: fallback("prepend", letters_first(WORDS)),
    "metaspace": lambda: fallback("first", letters_first(WORDS)),
}
