"""The tokenizer of a checkpoint: its file, and what the files of settings beside it say of its special tokens."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from ..errors import LlamaError
from ..tokenizer import Facts, Tokenizer
from ..vocabulary import LARGEST_ID, from_tiktoken, kind_of, read_file
from .checkpoint import Checkpoint
from .files import only_our_errors, read_json, write_json

logger = logging.getLogger("llama")

# In this order: the first needs no further package; what lies in original/ is Meta's, beside Hugging Face's files.
NAMES = ("tokenizer.model", "tokenizer.json", "tokenizer.bin", "original/tokenizer.model")


def find_tokenizer(folder: Path, llama2c: bool = False) -> Path | None:
    """The tokenizer's file in a folder, or None; llama2.c's own comes first where the checkpoint is that."""
    names = sorted(NAMES, key=lambda name: name != "tokenizer.bin") if llama2c else NAMES
    return next((folder / name for name in names if (folder / name).is_file()), None)


def open_tokenizer(given: Any, checkpoint: Checkpoint) -> Any:
    """The tokenizer for a checkpoint: of a file or a folder, of what lies beside it (None), or the caller's own object.

    BOS, EOS, stop ids and added tokens are those that the files beside it name. FileNotFoundError, or LlamaError that
    says what is wrong.
    """
    tokenizer = _open(given, checkpoint)
    if isinstance(tokenizer, Tokenizer):  # which decodes the rows behind its pieces to nothing
        tokenizer.n_rows = max(tokenizer.n_rows, checkpoint.shape("tok_embeddings.weight")[0])
    return tokenizer


def _open(given: Any, checkpoint: Checkpoint) -> Any:
    if given is None and checkpoint.tokenizer_data is not None:
        data, facts = checkpoint.tokenizer_data
        return Tokenizer.from_bytes(data, checkpoint.path, **facts)
    path: Path | None
    if given is None:
        path = checkpoint.tokenizer_path
        if path is None:
            wanted = "tokenizer.model or tokenizer.json"
            raise FileNotFoundError(f"no {wanted} beside {checkpoint.path}: pass tokenizer_path (--tokenizer)")
    elif isinstance(given, (str, Path)):
        path = _given_path(Path(os.path.expanduser(given)).absolute())
    else:
        return _check_object(given)
    return read_tokenizer(path, checkpoint)


def read_tokenizer(path: Path, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a file, with what the files beside it and beside the checkpoint say. Errors as `Tokenizer`'s."""
    with only_our_errors(path):
        config = _first_json("tokenizer_config.json", path, checkpoint)
        legacy = config.get("legacy") is True
        tokenizer = Tokenizer.from_bytes(read_file(path), path, added=_added(config, path, checkpoint), legacy=legacy)
        tokenizer.take_facts(path, _facts(config, tokenizer, checkpoint))
        return tokenizer


def _first_json(name: str, path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """A file of settings beside the tokenizer's, or in the checkpoint's folder where the tokenizer lies within it."""
    folders = [path.parent, *([checkpoint.folder] if checkpoint.folder.absolute() in path.absolute().parents else [])]
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    return {} if found is None else read_json(found, "a JSON file of Hugging Face's")


def _added(config: dict[str, Any], path: Path, checkpoint: Checkpoint) -> dict[str, int]:
    """Tokens by their text that a fine-tune put behind a vocabulary's pieces (added_tokens.json, or a newer list)."""
    added: dict[str, int] = {}
    decoder = config.get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and str(number).isdecimal():
            added[entry["content"]] = int(number[:9])
    added |= _first_json("added_tokens.json", path, checkpoint)
    return {text: token for text, token in added.items() if text and _is_id(token)}


def _is_id(token: Any) -> bool:
    return type(token) is int and 0 <= token < LARGEST_ID


def _facts(config: dict[str, Any], tokenizer: Tokenizer, checkpoint: Checkpoint) -> Facts:
    """BOS, EOS and padding by tokenizer_config.json's names, else SentencePiece's own, else by number in the model's
    settings; the ids that end a text by generation_config.json, else config.json.
    """
    names = ["generation_config.json"] if checkpoint.format in ("hf", "meta") else []
    names += ["config.json"] if checkpoint.format == "hf" else []
    paths = [path for name in names if (path := checkpoint.folder / name).is_file()]
    numbers = [read_json(path, "a JSON file of Hugging Face's") for path in paths]
    ends = next((found for held in numbers if (found := _ids(held.get("eos_token_id")))), [])
    begins = next((found for held in numbers if (found := _ids(held.get("bos_token_id")))), [])
    facts: Facts = {"stop_ids": ends}
    for name, by_number in (("bos", begins), ("eos", ends), ("pad", [])):
        named = _id_of(tokenizer, config.get(f"{name}_token"))
        own = getattr(tokenizer, f"{name}_id") if tokenizer.sp_model is not None else -1
        known = [token for token in (named, own, *by_number) if 0 <= token < tokenizer.n_words]
        facts[f"{name}_id"] = known[0] if known else None  # type: ignore[literal-required]
    stated = config.get("add_bos_token")
    facts["add_bos"] = stated if isinstance(stated, bool) else None
    return facts


def _ids(value: Any) -> list[int]:
    """One id or several, as config.json may have them."""
    return [token for token in (value if isinstance(value, list) else [value]) if _is_id(token)]


def _id_of(tokenizer: Tokenizer, token: Any) -> int:
    """The id of a special token by its text, or by what newer files say of it; -1 where it is none."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or not text:
        return -1
    found = tokenizer.special_ids.get(text, -1)
    if found < 0 and tokenizer.sp_model is not None:
        found = tokenizer.sp_model.piece_to_id(text)
        return -1 if found == tokenizer.sp_model.unk_id() else int(found)
    return found


def describe_tokenizer(checkpoint: Checkpoint) -> str:
    """One line for `info`: the file, its kind, how many pieces, what ends a text; or why it cannot be read."""
    place = checkpoint.path if checkpoint.tokenizer_source else checkpoint.tokenizer_path
    if place is None:
        return "not found"
    try:
        tokenizer = open_tokenizer(None, checkpoint)
    except (LlamaError, OSError) as error:
        return f"{place}, which cannot be read: {error}"
    ends, rows = ", ".join(map(str, sorted(tokenizer.stop_ids))), checkpoint.shape("tok_embeddings.weight")[0]
    refused = f"; build refuses it: the model has {rows} rows" if tokenizer.n_words > rows else ""
    return f"{place} ({tokenizer.vocabulary.kind}, {tokenizer.n_words} pieces, stop ids {ends or 'none'}{refused})"


def write_tokenizer_json(checkpoint: Checkpoint, folder: Path, context: int) -> None:
    """Llama 3's tiktoken file as tokenizer.json and its settings: Hugging Face's programs read nothing else of it."""
    path = checkpoint.tokenizer_path
    if path is None or (folder / "tokenizer.json").exists() or kind_of(read_file(path)) != "tiktoken":
        return
    try:
        tokenizer = open_tokenizer(path, checkpoint)
    except LlamaError as error:
        logger.warning("tokenizer.json is not written: %s", error)
        return
    text = json.dumps(from_tiktoken(tokenizer.vocabulary), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    if not (folder / "tokenizer_config.json").exists():
        marks = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        named = {name: tokenizer.vocabulary.piece(token) for name, token in marks.items()}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **named}
        write_json(folder / "tokenizer_config.json", config | {"clean_up_tokenization_spaces": False})


def _given_path(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = find_tokenizer(path)
    if found is None:
        raise FileNotFoundError(f"no tokenizer in {path}: looked for {', '.join(NAMES)}; give the file")
    return found


def _check_object(tokenizer: Any) -> Any:
    """A tokenizer of the caller's: whatever has `encode` and `decode`."""
    if not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
        raise LlamaError(
            f"tokenizer_path={tokenizer!r:.60} must be a path, None, or a tokenizer (an object with encode and decode)"
        )
    return tokenizer
