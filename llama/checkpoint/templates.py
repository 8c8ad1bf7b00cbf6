"""The chat template that lies beside a checkpoint or in it, and the special tokens that it is given."""

import logging
from pathlib import Path
from typing import Any

from ..chat import ChatFormat, family_format, pick_format
from ..errors import LlamaError
from .checkpoint import Checkpoint
from .files import format_error, only_our_errors, read_head, read_json, shortened
from .tokenizers import open_tokenizer

logger = logging.getLogger("llama")

LARGEST = 1_000_000  # bytes of a template; the longest in use have some twenty thousand
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
EXPECTED = "Hugging Face's settings of a tokenizer"


def choose_format(chat_format: Any, checkpoint: Checkpoint, tokenizer: Any) -> ChatFormat:
    """The chat format of a checkpoint: `chat_format` as in `Llama.build`. LlamaError as in `pick_format`."""
    wanted = chat_format is None or chat_format == "template"
    template = find_chat_template(checkpoint) if wanted else None
    guessed = None if checkpoint.format in ("meta", "llama2c", "llama2c-train") else str(checkpoint.path)
    variables = template_tokens(checkpoint) if template is not None else {}
    return pick_format(chat_format, tokenizer, template, variables, guessed)


def describe_format(checkpoint: Checkpoint) -> str:
    """One phrase for `info`: the chat format that `build` would take."""
    try:
        template = find_chat_template(checkpoint)
        if template is not None:
            return f"its own template ({len(template)} characters)"
        return {"Llama3Format": "llama3", "ChatMLFormat": "chatml"}.get(
            type(family_format(open_tokenizer(None, checkpoint))).__name__, "llama2"
        )
    except (LlamaError, OSError) as error:
        return f"not known: {shortened(str(error))}"


def find_chat_template(checkpoint: Checkpoint) -> str | None:
    """The checkpoint's own (GGUF), else chat_template.jinja, else tokenizer_config.json's: a text, or of several with
    names the "default". None where there is none, with a log line where no name fits. LlamaError for files that are
    none.
    """
    own: str | None = getattr(checkpoint, "chat_template", None)
    if own is not None or checkpoint.format not in ("meta", "hf"):
        return own
    path = checkpoint.folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    path = checkpoint.folder / "tokenizer_config.json"
    return _from_settings(path, _settings(path).get("chat_template"))


def _from_settings(path: Path, found: Any) -> str | None:
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        if "default" not in named:
            logger.warning('%s has chat templates, none of them named "default": not used', path)
            return None
        found = named["default"]
    if found is None:
        return None
    if not isinstance(found, str):
        raise format_error(
            path, f"a chat_template that is a {type(found).__name__}", "a text, or a list of named texts"
        )
    return found


def template_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """bos_token and the other special tokens as tokenizer_config.json names them, which templates may write; of a
    tokenizer in the weights' own file (GGUF) those that it marks.
    """
    if checkpoint.tokenizer_source is not None:
        try:
            tokenizer = open_tokenizer(None, checkpoint)
        except LlamaError:  # another one is used, or this is said where it is asked for
            return {}
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
        known = {name: token for name, token in ids.items() if token is not None and token >= 0}
        return {name: tokenizer.vocabulary.piece(token) for name, token in known.items()}
    if checkpoint.format not in ("meta", "hf"):
        return {}
    settings = _settings(checkpoint.folder / "tokenizer_config.json")
    texts = {name: settings.get(name) for name in TOKENS}
    texts = {name: text.get("content") if isinstance(text, dict) else text for name, text in texts.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _settings(path: Path) -> dict[str, Any]:
    with only_our_errors(path):
        return read_json(path, EXPECTED) if path.is_file() else {}


def _read_text(path: Path) -> str:
    with only_our_errors(path):
        read_head(path, "a chat template")
        size = path.stat().st_size
        if size > LARGEST:
            raise format_error(path, f"{size} bytes", f"a chat template, of at most {LARGEST} bytes")
        return path.read_text(encoding="utf-8")
