"""What lies beside the weights and goes with them when they are converted: tokenizers, special ids, other files."""

import logging
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import LlamaError
from ..tokenizer import SentencePieceProcessor, Tokenizer
from ..vocabulary import kind_of, read_file
from ..vocabulary.proto_check import check_proto
from .checkpoint import Checkpoint
from .files import read_json, write_json
from .tokenizers import open_tokenizer

logger = logging.getLogger("llama")

COMPANIONS = re.compile(r"[^.].*\.(json|jinja|txt|md|model)|(LICENSE|NOTICE|USE_POLICY).*", re.IGNORECASE)
# Settings and indexes are written anew, tokenizer.model by `copy_tokenizer`; an adapter was not part of the weights.
OWN = re.compile(r"(config|params|adapter_config)\.json|.*\.index\.json|tokenizer\.model")
LARGEST = 100_000_000  # bytes of a file that is copied along
ID_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the files beside Meta's or Hugging Face's weights that nothing here reads, such as tokenizer.json."""
    for path in sorted(checkpoint.folder.iterdir()) if checkpoint.format in ("meta", "hf") else ():
        if not path.is_file() or OWN.fullmatch(path.name) or not COMPANIONS.fullmatch(path.name):
            continue
        if leads_outside(path):
            logger.warning("%s is a link out of its folder and is not copied along", path)
        elif path.stat().st_size > LARGEST:
            logger.warning("%s is larger than %d MB and is not copied along", path, LARGEST // 1_000_000)
        else:
            shutil.copyfile(path, folder / path.name)


def leads_outside(path: Path) -> bool:
    """Whether this is a link to a file elsewhere: a stranger's folder must not make us copy what it does not hold.

    The Hub's cache is such links throughout: snapshots/REVISION/NAME leads to blobs/HASH.
    """
    folder, target = path.parent.resolve(), path.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None
    return path.is_symlink() and folder not in target.parents and target.parent != blobs


def special_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """BOS, EOS (one id or several) and padding by config.json's names: from the files beside, else the vocabulary."""
    names = ["config.json"] if checkpoint.format == "hf" else []
    if checkpoint.format in ("hf", "meta"):
        names.append("generation_config.json")
    for name in names:
        path = checkpoint.folder / name
        held = read_json(path, "a JSON file of Hugging Face's") if path.is_file() else {}
        ids = {name: held[name] for name in ID_NAMES if held.get(name) is not None}
        if ids:
            return ids
    tokenizer = try_tokenizer(checkpoint)
    if tokenizer is None:
        return {}
    ends: Any = sorted(tokenizer.stop_ids)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or -1}
    ids["pad_token_id"] = tokenizer.pad_id
    return {name: value for name, value in ids.items() if value != -1}


# ---------------------------------------------------------------------------------------- tokenizers


def try_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer; None, and a log line where one is there, if it cannot be read."""
    try:
        found = open_tokenizer(None, checkpoint)
    except FileNotFoundError:
        return None
    except LlamaError as error:
        logger.warning("the tokenizer is not read: %s", error)
        return None
    return found  # type: ignore[no-any-return]


def read_vocabulary(path: Path | None) -> SentencePieceProcessor | None:
    """The vocabulary, where the file is one of SentencePiece."""
    if path is None or path.suffix != ".model":
        return None
    try:
        data = read_file(path)
        check_proto(data)
        return SentencePieceProcessor(model_proto=data)
    except (RuntimeError, OSError, ValueError, LlamaError):
        return None


def own_vocabulary(checkpoint: Checkpoint) -> SentencePieceProcessor | None:
    """As `read_vocabulary`, of the tokenizer beside the weights, or in their own file."""
    if checkpoint.tokenizer_data is None:
        return read_vocabulary(checkpoint.tokenizer_path)
    tokenizer = try_tokenizer(checkpoint)
    return None if tokenizer is None else tokenizer.sp_model


def check_own_tokenizer(checkpoint: Checkpoint) -> None:
    """Leave out, with a log line, a tokenizer in the weights' own file that cannot be followed."""
    try:
        _ = checkpoint.tokenizer_data
    except LlamaError as error:
        logger.warning("the tokenizer is not written: %s", error)
        checkpoint.tokenizer_source = checkpoint.tokenizer_data = None


def _is_vocabulary(path: Path) -> bool:
    try:
        return bool(Tokenizer(str(path)))
    except (LlamaError, OSError, ImportError):
        return False


def copy_tokenizer(checkpoint: Checkpoint, folder: Path, to_bin: bool = False) -> None:
    """The tokenizer's file, or llama2c's tokenizer.bin made of it; a log line where there is none."""
    path, in_memory = checkpoint.tokenizer_path, checkpoint.tokenizer_data
    vocabulary = own_vocabulary(checkpoint) if to_bin else None
    if vocabulary is not None:
        (folder / "tokenizer.bin").write_bytes(tokenizer_bin(vocabulary))
    elif in_memory is not None:
        name = "tokenizer.json" if kind_of(in_memory[0]) == "tokenizer.json" else "tokenizer.model"
        (folder / name).write_bytes(in_memory[0])
    elif path is None:
        logger.warning("%s has no tokenizer, so none is written", checkpoint.path)
    elif to_bin and path.suffix == ".model":
        logger.warning("%s is no SentencePiece vocabulary: no tokenizer.bin is written", path)
    elif leads_outside(path) and not _is_vocabulary(path):
        logger.warning("%s is a link out of its folder, to no vocabulary, and is not copied along", path)
    else:
        shutil.copyfile(path, folder / path.name)


def write_tokenizer_config(checkpoint: Checkpoint, folder: Path, context: int) -> None:
    """What transformers needs beside the tokenizer's file, where the source brought nothing of the kind."""
    vocabulary, in_memory = own_vocabulary(checkpoint), checkpoint.tokenizer_data
    tokenizer = try_tokenizer(checkpoint) if vocabulary is not None or in_memory is not None else None
    if tokenizer is None or (folder / "tokenizer_config.json").exists():
        return
    unknown = -1 if vocabulary is None else vocabulary.unk_id()
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unk": unknown, "pad": tokenizer.pad_id}
    known = {name: token for name, token in ids.items() if token is not None and token >= 0}
    special = {f"{name}_token": tokenizer.vocabulary.piece(token) for name, token in known.items()}
    kind: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if vocabulary is not None:
        kind = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    config = {**kind, "model_max_length": context, **special}
    config |= {"add_bos_token": tokenizer.add_bos, "add_eos_token": False, "clean_up_tokenization_spaces": False}
    config |= {"chat_template": checkpoint.chat_template} if checkpoint.chat_template is not None else {}
    write_json(folder / "tokenizer_config.json", config)
    if not (folder / "special_tokens_map.json").exists():
        write_json(folder / "special_tokens_map.json", special)


def tokenizer_bin(vocabulary: SentencePieceProcessor) -> bytes:
    """llama2.c's tokenizer.bin: the longest token's length, then score, length and bytes of every token."""
    special = {vocabulary.bos_id(): "\n<s>\n", vocabulary.eos_id(): "\n</s>\n"}
    tokens = [special.get(i, vocabulary.id_to_piece(i)).replace("▁", " ").encode() for i in range(len(vocabulary))]
    scores = [vocabulary.get_score(i) for i in range(len(vocabulary))]
    body = [struct.pack("<fi", score, len(token)) + token for score, token in zip(scores, tokens, strict=True)]
    return struct.pack("<i", max(map(len, tokens))) + b"".join(body)


def check_for_llama2c(checkpoint: Checkpoint) -> None:
    """LlamaError for a vocabulary that llama2.c's programs would make other ids with; a log line for less."""
    path, rows = checkpoint.tokenizer_path, checkpoint.shape("tok_embeddings.weight")[0]
    vocabulary, in_memory = own_vocabulary(checkpoint), checkpoint.tokenizer_data
    if in_memory is not None or path is not None:
        kind = kind_of(in_memory[0] if in_memory is not None else read_file(path or checkpoint.path))
        if kind != "SentencePiece":
            found = f"{path or checkpoint.path} is a vocabulary of the kind {kind}, but llama2.c's programs know"
            raise LlamaError(f"{found} SentencePiece's: to write the weights alone, convert from a folder without it")
    if vocabulary is not None:
        differences = c_differences(vocabulary)
        if differences:
            found = f"{path}: llama2.c's programs would read text otherwise, because of {', '.join(differences)}"
            raise LlamaError(f"{found}: to write the weights alone, convert them from a folder without it")
        if len(vocabulary) != rows:
            logger.warning(
                "%s has %d pieces, but llama2.c's programs read %d, as the model has", path, len(vocabulary), rows
            )
    bos = special_ids(checkpoint).get("bos_token_id", 1)
    if bos != 1:
        logger.warning("%s begins a text with id %r; llama2.c's programs begin it with id 1", checkpoint.path, bos)


_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6  # types of pieces in sentencepiece_model.proto


def c_differences(vocabulary: SentencePieceProcessor) -> list[str]:
    """What of a SentencePiece model llama2.c's programs, made for Llama 2's, do not follow; nothing for that one."""
    model = list(_fields(vocabulary.serialized_model_proto()))
    pieces = [dict(_fields(value)) for tag, value in model if tag == 1]
    trainer, normalizer = (
        dict(field for tag, value in model if tag == wanted for field in _fields(value)) for wanted in (2, 3)
    )
    kinds = [piece.get(3, 1) for piece in pieces]
    names = [bytes(piece.get(1, b"")).decode("utf-8", "replace") for piece in pieces]
    ids = (vocabulary.unk_id(), vocabulary.bos_id(), vocabulary.eos_id())
    own = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED, _UNUSED) and i not in ids]
    found = {
        f"unknown, BOS and EOS with the ids {ids} (they take 0, 1, 2)": ids != (0, 1, 2),
        f"a pad piece (id {vocabulary.pad_id()})": vocabulary.pad_id() >= 0,
        f"control, user-defined or unused pieces ({', '.join(names[i] for i in own[:3])})": bool(own),
        "no byte pieces at ids 3 to 258 (byte fallback)": names[3:259] != [f"<0x{byte:02X}>" for byte in range(256)]
        or set(kinds[3:259]) != {_BYTE},
        "a unigram, word or character model (they merge pairs, BPE)": trainer.get(3, 1) != 2,
        "no space put before a text (add_dummy_prefix)": normalizer.get(3, 1) == 0,
        "spaces that are removed (remove_extra_whitespaces)": normalizer.get(4, 1) != 0,
        "spaces that are not written as ▁ (escape_whitespaces)": normalizer.get(5, 1) == 0,
        "spaces behind words (treat_whitespace_as_suffix)": trainer.get(24, 0) != 0,
        "characters that are normalized (normalization_rule_name)": bool(normalizer.get(2)),
    }
    return [what for what, is_so in found.items() if is_so]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: an int (varint) or bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte, place = data[place], place + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            yield key >> 3, data[place : place + size]
            place += size
