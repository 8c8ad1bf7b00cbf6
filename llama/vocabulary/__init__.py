"""Vocabularies by their file: SentencePiece, Llama 3's tiktoken, Hugging Face's tokenizer.json; told by content."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import LlamaError
from .base import LARGEST_ID, Vocabulary
from .hf import LARGEST, JsonVocabulary, from_tiktoken
from .sentencepiece import SentencePieceProcessor, SentencePieceVocabulary
from .tiktoken import TiktokenVocabulary

__all__ = [
    "LARGEST_ID",
    "SentencePieceProcessor",
    "TiktokenVocabulary",
    "Vocabulary",
    "from_tiktoken",
    "kind_of",
    "make_vocabulary",
    "read_file",
]

_LARGEST = 2**24  # bytes of a SentencePiece or tiktoken file; Llama 2's has half a million, Llama 3's two
_TIKTOKEN = re.compile(rb"[a-z0-9+/]+=* \d+\r?\n", re.IGNORECASE)


def read_file(path: Path) -> bytes:
    """The bytes of a tokenizer's file, of bounded length. FileNotFoundError, or LlamaError, says what it is instead."""
    if not os.path.exists(path):  # False too for a name that no file can have
        raise FileNotFoundError(
            f"no tokenizer at {path}: give the path of the tokenizer.model or tokenizer.json that came with the weights"
        )
    if not path.is_file():
        raise LlamaError(f"{path} is a folder or a device: give the path of the tokenizer.model in it")
    try:
        with path.open("rb") as file:
            return file.read(LARGEST + 1)
    except OSError as error:
        raise LlamaError(
            f"{path} cannot be read ({error.strerror}): give a tokenizer.model that you may read"
        ) from error


def make_vocabulary(
    data: bytes, path: Path, added: Mapping[str, int] | None = None, legacy: bool = False
) -> Vocabulary:
    """The vocabulary in `data`, `added` and `legacy` for SentencePiece's. LlamaError says what the data are instead."""
    head, kind = _head(data), kind_of(data)
    is_json, is_tiktoken = kind == "tokenizer.json", kind == "tiktoken"
    limit = LARGEST if is_json else _LARGEST
    problem = _problem(data, head) if len(data) <= limit else f"has more than {limit} bytes: no vocabulary of Llama's"
    if problem is not None:
        raise LlamaError(f"{path} {problem}")
    try:
        if is_json:
            return JsonVocabulary(data)
        return TiktokenVocabulary(data) if is_tiktoken else SentencePieceVocabulary(data, added, legacy)
    except LlamaError:
        raise
    except Exception as error:  # SentencePiece's own errors have no common class
        found = str(error) if isinstance(error, ValueError) else f"{len(data)} bytes that cannot be read"
        what = "neither a whole SentencePiece model nor a whole llama2.c tokenizer.bin"
        if is_json or is_tiktoken:
            what = "no tokenizer.json that can be read" if is_json else "no whole Llama 3 vocabulary (tiktoken)"
        raise LlamaError(
            f"{path} is {what} ({found:.300}): "
            f"fetch it again, or give the path of the tokenizer.model that came with the weights"
        ) from error


def kind_of(data: bytes) -> str:
    """ "tokenizer.json", "tiktoken" or "SentencePiece" (tokenizer.bin too): what the first bytes look like."""
    head = _head(data)
    if head.startswith(b"{") and b"\0" not in head:
        return "tokenizer.json"
    return "tiktoken" if _TIKTOKEN.match(head) else "SentencePiece"


def _head(data: bytes) -> bytes:
    return data[:512].removeprefix(b"\xef\xbb\xbf").lstrip().lower()


def _problem(data: bytes, head: bytes) -> str | None:
    """What a file is that is no vocabulary, and what to do about it."""
    if not data:
        return "is empty: fetch it again (the download stopped before its first byte)"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself: run 'git lfs pull' in its folder"
    if head.startswith(b"<") and b"\0" not in head:
        return "is an HTML page, not a tokenizer: the download link has expired or needs a login; fetch it again"
    return None
