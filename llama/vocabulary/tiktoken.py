"""Llama 3's tokenizer.model: a tiktoken file, `base64 rank` a line, and the 256 special tokens behind it."""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from .base import BytePieces, import_extra, show

PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # words, with one sign before them
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # spaces but for the last, which goes with the word
        r"\s+",
    ]
)
# The ids are those of every release, the names llama-models' of today; reserved tokens fill up the 256.
NAMED = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)
N_SPECIAL = 256
STOPS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
SLICE, LONGEST_RUN = 400_000, 25_000  # characters, as published: they change ids, and longer runs overflow a stack


class TiktokenVocabulary:
    """Llama 3's vocabulary. ValueError says what is wrong with a file: ranks must be 0 to n - 1, each once, pieces
    different, and all 256 bytes among them.
    """

    kind = "tiktoken (Llama 3)"
    add_bos = True
    holes: frozenset[int] = frozenset()

    def __init__(self, data: bytes) -> None:
        ranks = read_ranks(data)
        count = len(ranks)
        names = [*NAMED, *(f"<|reserved_special_token_{i}|>" for i in range(2, N_SPECIAL - len(NAMED) + 2))]
        self.special_ids = {name: count + i for i, name in enumerate(names)}
        self.n_words = count + N_SPECIAL
        self.bos_id, self.eos_id = self.special_ids["<|begin_of_text|>"], self.special_ids["<|end_of_text|>"]
        self.pad_id = self.special_ids["<|finetune_right_pad_id|>"]
        self.stop_ids = frozenset(self.special_ids[name] for name in STOPS)
        package = import_extra("tiktoken", "a Llama 3 tokenizer.model")
        self._model: Any = package.Encoding(
            "llama3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_ids
        )
        specials = {token: name.encode() for name, token in self.special_ids.items()}
        self._pieces = BytePieces({token: piece for piece, token in ranks.items()} | specials)

    def encode(self, text: str, *, prefix_space: bool = True, specials: bool = False) -> list[int]:
        """As `Vocabulary.encode`, in the published slices; no space before a text, half a character is U+FFFD."""
        allowed: Any = "all" if specials else set()
        ids: list[int] = []
        for part in slices(text):
            ids += self._model.encode(part, allowed_special=allowed, disallowed_special=())
        return ids

    def decode(self, ids: list[int], *, keep_space: bool = False) -> str:
        """As `Vocabulary.decode`; special tokens are their text, as published."""
        return self._pieces.decode(ids)

    def piece(self, token: int) -> str:
        """As `Vocabulary.piece`."""
        return show(self._pieces[token])

    def ranks(self) -> dict[bytes, int]:
        """Piece to rank, as in the file."""
        return {self._pieces[token]: token for token in range(self.n_words - N_SPECIAL)}

    def __getstate__(self) -> dict[str, Any]:
        lines = (f"{base64.b64encode(piece).decode()} {token}\n" for piece, token in self.ranks().items())
        return {"ranks": "".join(lines)}

    def __setstate__(self, state: dict[str, str]) -> None:
        TiktokenVocabulary.__init__(self, state["ranks"].encode())


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Piece to rank of a whole file; ValueError otherwise."""
    ranks: dict[bytes, int] = {}
    lines = data.splitlines()
    for place, line in enumerate(lines, 1):
        try:
            text, rank = line.split(b" ")
            piece, place_of = base64.b64decode(text, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {place} is {line[:40]!r}, not 'base64 rank'") from None
        if not piece or piece in ranks:
            raise ValueError(f"line {place} holds {'a piece that came before' if piece else 'an empty piece'}")
        ranks[piece] = place_of
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"its {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once")
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise ValueError(f"{len(absent)} of the 256 single bytes are missing, 0x{absent[0]:02X} the first")
    return ranks


def slices(text: str) -> Iterator[str]:
    """A text in slices of 400,000 characters, and these before a run of spaces, or of others, would pass 25,000."""
    for start in range(0, len(text), SLICE):
        part = text[start : start + SLICE]
        begin, run, in_space = 0, 0, False
        for i, letter in enumerate(part) if len(part) > LONGEST_RUN else ():
            if letter.isspace() == in_space:
                run += 1
                if run > LONGEST_RUN:
                    yield part[begin:i]
                    begin, run = i, 1
            else:
                in_space, run = not in_space, 1
        yield part[begin:]
