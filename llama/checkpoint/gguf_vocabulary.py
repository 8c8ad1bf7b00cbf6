"""The tokenizer in a GGUF file's metadata, as a file that `Tokenizer.from_bytes` reads.

Kind "llama" becomes a SentencePiece model, kind "gpt2" (BPE over bytes) a tokenizer.json of Hugging Face's. Keys and
what holds where one is missing: ggml's docs/gguf.md and llama.cpp's llama-vocab.cpp.
"""

import json
import math
import struct
from typing import Any

from ..vocabulary.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, field, number
from .files import format_error
from .gguf import GGUF, Array

MAX_TOKENS = 1 << 20
_KEY = "tokenizer.ggml."
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Into what words a text is cut: each pattern in turn cuts what those before have left. llama.cpp's names.
PATTERNS = {
    "llama-bpe": [_LLAMA3],
    "llama3": [_LLAMA3],
    "llama-v3": [_LLAMA3],
    "smollm": [r"\p{N}", _GPT2],
    "gpt-2": [_GPT2],
    "default": [r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token is taken whole; and BOS comes first


def has_tokenizer(part: GGUF) -> bool:
    """Whether the metadata holds one, of whatever kind."""
    return part.metadata.get(_KEY + "model") not in (None, "none", "no_vocab")


def chat_template(part: GGUF) -> str | None:
    """The Jinja template that came with the model."""
    template = part.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def tokenizer_data(part: GGUF) -> tuple[bytes, dict[str, Any]]:
    """A tokenizer's file, and `bos_id`, `eos_id`, `stop_ids`, `add_bos`. LlamaError for one that cannot be followed."""
    kind, pattern = part.metadata.get(_KEY + "model"), part.metadata.get(_KEY + "pre")
    texts, types = _tokens(part)
    if kind == "llama":
        facts = _facts(part, len(texts), {"bos": 1, "eos": 2}, True)
        return _sentencepiece(part, texts, types, facts), facts
    if kind != "gpt2":
        raise _error(part, f"{_KEY}model is {kind!r:.60}", "'llama' (SentencePiece) or 'gpt2' (BPE over bytes)")
    if not isinstance(pattern, str) or pattern not in PATTERNS:
        found = f"{_KEY}pre is {pattern!r:.60}, a way of cutting texts into words that this library does not know"
        raise _error(part, found, f"one of {', '.join(PATTERNS)}")
    facts = _facts(part, len(texts), {}, pattern in WHOLE_WORDS)
    return _byte_bpe(part, pattern, texts, types, facts), facts


def _error(part: GGUF, found: str, expected: str) -> Exception:
    return format_error(part.path, found, f"{expected}; or give another tokenizer (tokenizer_path, --tokenizer)")


def _tokens(part: GGUF) -> tuple[list[str], list[int]]:
    """Text and type of every id."""
    tokens, kinds = (part.metadata.get(_KEY + name) for name in ("tokens", "token_type"))
    stored = tokens.texts() if isinstance(tokens, Array) and tokens.length <= MAX_TOKENS else []
    if not isinstance(tokens, Array) or not stored:
        raise _error(part, f"{_KEY}tokens is {tokens!r:.60}", f"a list of 1 to {MAX_TOKENS} texts")
    types = [NORMAL] * tokens.length if kinds is None else _numbers(part, "token_type", tokens.length)
    try:
        texts = [text.decode("utf-8") for text in stored]
    except UnicodeDecodeError as error:
        raise _error(part, f"a token that is no UTF-8 ({error.object[:40]!r})", "texts") from None
    texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]  # as llama.cpp has it
    seen: dict[str, int] = {}
    for index, text in enumerate(texts):
        if seen.setdefault(text, index) != index:
            raise _error(part, f"the token {text!r:.60} with the ids {seen[text]} and {index}", "every token once")
    return texts, [int(kind) for kind in types]


def _numbers(part: GGUF, name: str, count: int) -> list[Any]:
    found = part.metadata.get(_KEY + name)
    if not isinstance(found, Array) or not found.is_plain or found.length != count:
        raise _error(part, f"{_KEY}{name} is {found!r:.60}", f"{count} numbers, one for each token")
    values = list(found.numbers())
    if not all(math.isfinite(value) for value in values):
        raise _error(part, f"{_KEY}{name} holds NaN or inf", "numbers")
    return values


def _facts(part: GGUF, count: int, absent: dict[str, int], adds_bos: bool) -> dict[str, Any]:
    """The ids that begin, end and pad a text, and whether BOS begins every one."""
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom"):
        value = part.metadata.get(f"{_KEY}{name}_token_id", absent.get(name))
        if value is not None and (type(value) is not int or not 0 <= value < count):
            raise _error(part, f"{_KEY}{name}_token_id is {value!r:.40}", f"an id from 0 to {count - 1}")
        ids[name] = value
    stops = {token for name, token in ids.items() if name != "bos" and token is not None}
    add_bos, pad = (part.metadata.get(_KEY + name) for name in ("add_bos_token", "padding_token_id"))
    if add_bos is not None and not isinstance(add_bos, bool):
        raise _error(part, f"{_KEY}add_bos_token is {add_bos!r:.40}", "true or false")
    return {
        **{"bos_id": ids["bos"], "eos_id": ids["eos"], "stop_ids": stops},
        "pad_id": pad if type(pad) is int and 0 <= pad < count else None,
        "add_bos": (adds_bos if add_bos is None else add_bos) and ids["bos"] is not None,
    }


# ------------------------------------------------------------------------------------------- SentencePiece


def _sentencepiece(part: GGUF, texts: list[str], types: list[int], facts: dict[str, Any]) -> bytes:
    """sentencepiece_model.proto, written by hand: the pieces, and the settings that Llama's own file has."""
    scores = _numbers(part, "scores", len(texts))
    unknown = [index for index, kind in enumerate(types) if kind == UNKNOWN]
    if len(unknown) != 1 or not set(types) <= set(range(1, 7)):
        raise _error(
            part, f"{len(unknown)} tokens of the type 'unknown' (2), and types {sorted(set(types))!r:.60}", "one"
        )
    pieces = [
        field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind))
        for text, score, kind in zip(texts, scores, types, strict=True)
    ]
    bytes_ = sorted(text for text, kind in zip(texts, types, strict=True) if kind == BYTE)
    if bytes_ and bytes_ != [f"<0x{byte:02X}>" for byte in range(256)]:
        raise _error(part, f"{len(bytes_)} tokens of the type 'byte' (6)", "none, or <0x00> to <0xFF>")
    trainer = number(3, 2) + number(35, int(bool(bytes_)))  # BPE; bytes for what has no piece
    special = {"unk": unknown[0], "bos": facts["bos_id"], "eos": facts["eos_id"]}
    for tag, (_, token) in enumerate(special.items()):
        trainer += number(40 + tag, token) + field(45 + tag, texts[token].encode())
    trainer += number(43, 2**64 - 1)  # no padding
    prefix = part.metadata.get(_KEY + "add_space_prefix", True)
    spaces = part.metadata.get(_KEY + "remove_extra_whitespaces", False)
    normalizer = field(1, b"identity") + number(3, int(bool(prefix))) + number(4, int(bool(spaces)))
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer)


# ------------------------------------------------------------------------------------------- BPE over bytes


def _byte_bpe(part: GGUF, pattern: str, texts: list[str], types: list[int], facts: dict[str, Any]) -> bytes:
    """tokenizer.json, as the package `tokenizers` reads it."""
    merges = part.metadata.get(_KEY + "merges")
    pairs = merges.texts() if isinstance(merges, Array) and merges.length <= MAX_TOKENS else []
    if not pairs:
        raise _error(part, f"{_KEY}merges is {merges!r:.60}", f"a list of 1 to {MAX_TOKENS} texts, two tokens each")
    while texts and types[len(texts) - 1] == UNUSED and texts[-1].startswith("[PAD"):
        texts = texts[:-1]  # the converter's own, where the vocabulary is shorter than the embedding
    special = [index for index in range(len(texts)) if types[index] in (CONTROL, USER_DEFINED)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": texts[i], **flags, "special": types[i] == CONTROL} for i in special]
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in PATTERNS[pattern]
    ]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "ignore_merges": pattern in WHOLE_WORDS,
        "vocab": {text: index for index, text in enumerate(texts)},
        "merges": [pair.decode("utf-8", "replace") for pair in pairs],
    }
    made = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, as_bytes]},
        "post_processor": _template(texts, facts),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    return json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode()


def _template(texts: list[str], facts: dict[str, Any]) -> dict[str, Any] | None:
    """What puts BOS before a text, or before each of two, where the model wants it."""
    if not facts["add_bos"]:
        return None
    bos = texts[facts["bos_id"]]
    first, second = (
        [{"SpecialToken": {"id": bos, "type_id": i}}, {"Sequence": {"id": "AB"[i], "type_id": i}}] for i in (0, 1)
    )
    special = {bos: {"id": bos, "ids": [facts["bos_id"]], "tokens": [bos]}}
    return {"type": "TemplateProcessing", "single": first, "pair": first + second, "special_tokens": special}
