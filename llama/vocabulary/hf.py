"""Hugging Face's tokenizer.json: BPE with byte fallback (Llama 2) and byte-level BPE (Llama 3, SmolLM2)."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import LlamaError
from .base import LARGEST_ID, TAG, BytePieces, check_utf8, import_extra, show
from .tiktoken import PATTERN, STOPS, TiktokenVocabulary

LARGEST = 2**25  # bytes; Llama 3's has 9 to 17 million
MOST_PARTS = 2_000_000  # arrays and objects in one file; Llama 3's has 280 thousand, one a merge
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<|endoftext|>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>")
PAD_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]")


class JsonVocabulary:
    """A tokenizer.json whose model is BPE. Encoding is the tokenizers package's, decoding our own, byte for byte.

    ValueError says what cannot be read, or what this library does not follow.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._model, stated = _load(data)
        steps = {name: _state(getattr(self._model, name)) for name in ("normalizer", "pre_tokenizer", "decoder")}
        self._byte_level = any(part.get("type") == "ByteLevel" for part in _parts(steps))
        if not self._byte_level and not self._model.model.byte_fallback:
            raise ValueError("a model whose bytes this library does not know (neither ByteLevel nor byte_fallback)")
        self.kind = "tokenizer.json " + ("(byte-level BPE)" if self._byte_level else "(BPE with byte fallback)")
        self._drops_space = not self._byte_level and _drops_space(steps["decoder"])
        self._take_pieces(stated)
        self._take_marks()
        self._lock = threading.Lock()
        self._spaced = (self._model.normalizer, self._model.pre_tokenizer)
        plain = _blank(_without_prefix(steps["normalizer"]), _without_prefix(steps["pre_tokenizer"]))
        self._unspaced = (plain.normalizer, plain.pre_tokenizer)
        self._set_up = (True, False)  # with the space before a text, without specials

    def _take_pieces(self, stated: dict[str, int]) -> None:
        """Every id's bytes, and which pieces are control pieces; those stay text from now on."""
        vocab: dict[str, int] = self._model.get_vocab(True)
        if not vocab or max(vocab.values()) >= LARGEST_ID:
            raise ValueError(f"{len(vocab)} pieces with ids up to {max(vocab.values(), default=0)}")
        names = {token: text for text, token in vocab.items()}
        if len(names) != len(vocab):
            raise ValueError("two pieces with one id")
        for text, token in stated.items():
            if vocab.get(text) != token:
                found = f"the added token {text!r:.60} with id {token}, for which the tokenizers package takes"
                raise ValueError(f"{found} {vocab.get(text)}: the ids must follow each other")
        self.n_words = max(names) + 1
        self.holes = frozenset(range(self.n_words)) - names.keys()
        added = self._model.get_added_tokens_decoder()
        controls = {token: one for token, one in added.items() if one.special or TAG.fullmatch(one.content)}
        self._controls = {token: one.content for token, one in controls.items()}
        self.special_ids = {text: token for token, text in self._controls.items()}
        hidden = [] if self._byte_level else [token for token, one in controls.items() if one.special]
        unmarked = [one for one in controls.values() if not one.special]
        for one in unmarked:
            one.special = True
        self._model.add_special_tokens(unmarked)
        self._model.encode_special_tokens = True  # they are encoded as text
        to_bytes = _from_alphabet if self._byte_level else _from_fallback
        pieces = {token: to_bytes(text) for token, text in names.items()}
        pieces |= {token: one.content.encode() for token, one in added.items()}
        pieces |= dict.fromkeys(hidden, b"")
        self._names = {} if self._byte_level else names
        self._pieces = BytePieces(pieces)

    def _take_marks(self) -> None:
        """BOS, EOS and padding as far as this file says; tokenizer_config.json says it better."""
        template = _template(_state(self._model.post_processor))
        first = "" if template is None else str(template[0].get("SpecialToken", {}).get("id", ""))
        in_family = "<|begin_of_text|>" in self.special_ids if template is None else bool(first)
        self.add_bos = in_family or not self._byte_level  # transformers 5 writes Llama 2's template without its BOS
        self.bos_id = self._first_id(first, *BOS_NAMES)
        self.eos_id, self.pad_id = self._first_id(*EOS_NAMES), self._first_id(*PAD_NAMES)
        self.stop_ids = frozenset(self.special_ids[name] for name in STOPS if name in self.special_ids)

    def _first_id(self, *names: str) -> int:
        return next((self.special_ids[name] for name in names if name in self.special_ids), -1)

    def encode(self, text: str, *, prefix_space: bool = True, specials: bool = False) -> list[int]:
        """As `Vocabulary.encode`; whether a space is put before a text is the file's to say, unless it is False."""
        check_utf8(text)
        ids = self._encode(text, prefix_space, specials)
        return ids if specials or self._controls.keys().isdisjoint(ids) else [*self._as_text(ids)]

    def _encode(self, text: str, prefix_space: bool, specials: bool) -> list[int]:
        with self._lock:  # the settings are the model's
            if self._set_up != (prefix_space, specials):
                spaces = self._spaced if prefix_space else self._unspaced
                self._model.normalizer, self._model.pre_tokenizer = spaces
                self._model.encode_special_tokens = not specials
                self._set_up = (prefix_space, specials)
            try:
                return self._model.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic in Rust is no Exception; a file's pattern that does not end is one
                found = " ".join(str(error).split())
                raise LlamaError(
                    f"the tokenizers package cannot encode a text of {len(text)} characters by this tokenizer.json: "
                    f"{found:.200}; use the tokenizer.model that came with the weights"
                ) from error

    def _as_text(self, ids: list[int]) -> Iterator[int]:
        """Ids of a text in which a control piece came out of merges: the ids of its letters in its place."""
        for token in ids:
            if token in self._controls:
                parts = [i for letter in self._controls[token] for i in self._encode(letter, False, False)]
                yield from (part for part in parts if part not in self._controls)
            else:
                yield token

    def decode(self, ids: list[int], *, keep_space: bool = False) -> str:
        """As `Vocabulary.decode`. Special pieces are their text in byte-level BPE, as in Llama 3's file, and no text
        where bytes are a fallback, as in Llama 2's; there the space before the first word is dropped too.
        """
        text = self._pieces.decode(ids)
        if not self._drops_space or keep_space or not text.startswith(" "):
            return text
        first = next(token for token in ids if self._pieces[token])
        return text[1:] if self._names[first].startswith("\u2581") else text

    def piece(self, token: int) -> str:
        """As `Vocabulary.piece`."""
        if self._byte_level:
            return show(self._pieces[token])
        return self._names.get(token, "").replace("\u2581", " ")

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self._data}

    def __setstate__(self, state: dict[str, bytes]) -> None:
        JsonVocabulary.__init__(self, state["data"])


# ------------------------------------------------------------------------------------------ the file


def _load(data: bytes) -> tuple[Any, dict[str, int]]:
    """The tokenizers package's object, and the ids that the file states for its added tokens. ValueError where the
    package or this library refuses.
    """
    if len(data) > LARGEST or data.count(b"[") + data.count(b"{") > MOST_PARTS:
        raise ValueError(f"{len(data)} bytes: more than {LARGEST}, or more than {MOST_PARTS} arrays and objects")
    package = import_extra("tokenizers", "a tokenizer.json")
    try:
        text = data.decode("utf-8-sig")
        whole = package.Tokenizer.from_str(text)  # which bounds the depth
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise ValueError(" ".join(str(error).split())[:200]) from error
    if type(whole.model).__name__ != "BPE":
        raise ValueError(f"a model of type {type(whole.model).__name__}; this library follows BPE")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if value := getattr(whole.model, name):
            raise ValueError(f"a model with {name} {value!r:.40}, which Llama's do not have")
    whole.no_truncation()
    whole.no_padding()
    return whole, _stated_ids(text)


def _stated_ids(text: str) -> dict[str, int]:
    """Id of each added token as the file has it: all of it as Python objects would take a second and 100 MB."""
    for found in re.finditer(r'"added_tokens"\s*:\s*(?=\[)', text):
        entries = json.JSONDecoder().raw_decode(text, found.end())[0]
        return {entry["content"]: entry["id"] for entry in entries}
    return {}


def _state(step: Any) -> Any:
    """A step of the tokenizers package's as its part of the file; None where there is none."""
    return None if step is None else json.loads(step.__getstate__())


def _parts(step: Any) -> Iterator[dict[str, Any]]:
    """Every object within a step of the file, itself first."""
    if isinstance(step, dict):
        yield step
        for value in step.values():
            yield from _parts(value)
    elif isinstance(step, list):
        for value in step:
            yield from _parts(value)


def _drops_space(decoder: Any) -> bool:
    """Whether a decoder drops the space that was put before the text."""
    for part in _parts(decoder):
        if part.get("type") == "Strip" and part.get("content") == " " and part.get("start"):
            return True
        if part.get("type") == "Metaspace":
            return part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True) is True
    return False


def _without_prefix(step: Any) -> Any:
    """A normalizer or pre-tokenizer that puts nothing before a text."""
    if isinstance(step, list):
        return [_without_prefix(value) for value in step if not _prepends(value)]
    if not isinstance(step, dict):
        return step
    if _prepends(step):
        return None
    changed = {name: _without_prefix(value) for name, value in step.items()}
    if "prepend_scheme" in changed or changed.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
        changed.pop("add_prefix_space", None)  # what older files say in its place
    elif "add_prefix_space" in changed:
        changed["add_prefix_space"] = False
    return changed


def _prepends(step: Any) -> bool:
    return isinstance(step, dict) and step.get("type") == "Prepend"


def _blank(normalizer: Any, pre_tokenizer: Any) -> Any:
    """A tokenizer of these steps and nothing else."""
    settings = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": {"type": "BPE", "vocab": {}}}
    settings["model"]["merges"] = []
    return import_extra("tokenizers", "a tokenizer.json").Tokenizer.from_str(json.dumps(settings))


def _template(post_processor: Any) -> list[dict[str, Any]] | None:
    """What a template makes of one text: {"SpecialToken": {"id": name}} and {"Sequence": ...}, in order."""
    for part in _parts(post_processor):
        if part.get("type") == "TemplateProcessing" and part.get("single"):
            return list(part["single"])
    return None


# --------------------------------------------------------------------------------------- bytes of pieces


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it prints, else one from U+0100 up."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _from_alphabet(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[letter] for letter in piece])
    except KeyError:
        return piece.encode()


def _from_fallback(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("\u2581", " ").encode()


# ------------------------------------------------------------------------------------------- writing


def from_tiktoken(vocabulary: TiktokenVocabulary) -> dict[str, Any]:
    """Llama 3's tiktoken file as the tokenizer.json that transformers, vLLM and llama.cpp's converter read."""
    ranks = vocabulary.ranks()
    letters = {byte: letter for letter, byte in _ALPHABET.items()}
    names = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    merges: list[list[str]] = []
    for piece in sorted(ranks, key=ranks.__getitem__):  # a merge's place is its priority: the rank of what it makes
        halves = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
        known = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [[names[a], names[b]] for _, _, a, b in sorted(known)]
    first = next(name for name, token in vocabulary.special_ids.items() if token == vocabulary.bos_id)
    text, level = {"Sequence": {"id": "A", "type_id": 0}}, {"type": "ByteLevel", "add_prefix_space": False}
    level |= {"trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": name, **flags, "special": True} for name, token in vocabulary.special_ids.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": first, "type_id": 0}}, text],
            "pair": [{"SpecialToken": {"id": first, "type_id": 0}}, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {first: {"id": first, "ids": [vocabulary.bos_id], "tokens": [first]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "byte_fallback": False,
            "fuse_unk": False,
            "vocab": {names[piece]: rank for piece, rank in ranks.items()},
            "merges": merges,
        },
    }
