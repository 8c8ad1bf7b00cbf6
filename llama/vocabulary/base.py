"""What every vocabulary can do, and what several of them share."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..errors import LlamaError

LARGEST_ID = 2**22  # a vocabulary of more is none of Llama's, and tables of ids would fill the memory
# What a file calls an added token, though it marks roles or ends: text that looks so is a control piece all the same.
TAG = re.compile(r"\s*▁?(<.+>|\[.+\])\s*", re.DOTALL)


class Vocabulary(Protocol):
    """Text to ids and back, by one file. Ids go from 0 to `n_words` - 1; one that the file lacks is -1."""

    kind: str  # for `info`: what wrote the file
    n_words: int
    bos_id: int
    eos_id: int
    pad_id: int
    stop_ids: frozenset[int]  # that end a text, beside `eos_id`
    add_bos: bool  # whether a text begins with BOS, as far as the file says
    special_ids: dict[str, int]  # text of each control piece
    holes: frozenset[int]  # ids below `n_words` that have no piece

    def encode(self, text: str, *, prefix_space: bool = True, specials: bool = False) -> list[int]:
        """The ids of a text; `specials` makes the text of a control piece its id, which text never is otherwise."""
        ...

    def decode(self, ids: list[int], *, keep_space: bool = False) -> str:
        """The text of ids below `n_words`, a broken character as U+FFFD; a hole is no text."""
        ...

    def piece(self, token: int) -> str:
        """An entry as one would show it: with its leading space, a byte or part of a character as `<0x0A>`."""
        ...


def import_extra(package: str, what: str) -> Any:
    """The package that reads `what`; LlamaError names the extra to install where it is missing."""
    try:
        return __import__(package)
    except ImportError as error:
        raise LlamaError(
            f"{what} needs the package {package}, which {sys.executable} cannot import ({error}); "
            f"install it with: {sys.executable} -m pip install {package} (llama's extra '{package}')"
        ) from error


def check_utf8(text: str) -> None:
    """LlamaError for half a character, with its place."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LlamaError(
            f"the text holds {text[error.start]!r} at place {error.start}: half a character (a lone surrogate), "
            f"which UTF-8 cannot write; text.encode('utf-8', 'replace').decode() puts '?' there"
        ) from error


def split_at(text: str, names: Mapping[str, int]) -> Iterator[str | int]:
    """The text in parts: an id for each of `names` (the longest where several begin), what lies between as text."""
    if not names:
        yield text
        return
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    for part in re.split(f"({pattern})", text):
        if part:
            yield names.get(part, part)


def show(data: bytes) -> str:
    """Bytes of a piece as text, or `<0xE2><0x82>` where they are part of a character."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in data)


class BytePieces:
    """A table of the bytes of each id, for byte BPE; a hole has none."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._bytes = [pieces.get(token, b"") for token in range(max(pieces) + 1)]

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, token: int) -> bytes:
        return self._bytes[token]

    def decode(self, ids: Sequence[int]) -> str:
        """All bytes, then UTF-8, so that a character may lie in several ids."""
        return b"".join([self._bytes[token] for token in ids]).decode("utf-8", "replace")
