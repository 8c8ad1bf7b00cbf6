"""Which chat format a model gets: the caller's word, the checkpoint's template, the vocabulary's family, Llama 2."""

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import LlamaError
from . import chatml, llama3
from .dialog import ChatFormat
from .llama2 import LLAMA2, Llama2Format
from .segments import special_ids_of
from .template import TemplateFormat

logger = logging.getLogger("llama")

FORMATS = ("llama2", "llama3", "chatml", "template")


def family_format(tokenizer: Any) -> ChatFormat:
    """What the control pieces of a vocabulary tell: Llama 3's headers, ChatML's marks; else Llama 2's."""
    specials = special_ids_of(tokenizer)
    if all(name in specials for name in llama3.PIECES):
        return llama3.Llama3Format(tokenizer)
    if chatml.START in specials and chatml.END in specials:
        return chatml.ChatMLFormat(tokenizer)
    return LLAMA2


class GuessedLlama2(Llama2Format):
    """Llama 2's format where nothing tells that it is right, which the first dialog's log line says."""

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint: str | None = checkpoint

    def check(self, dialog: Any, index: int = 0) -> None:
        """As `Llama2Format.check`."""
        if self._checkpoint is not None:
            logger.warning(
                "%s has no chat template: dialogs are written in Llama 2's format, which may not be its own; "
                "chat_format= names another (%s)",
                self._checkpoint,
                ", ".join(FORMATS),
            )
            self._checkpoint = None
        super().check(dialog, index)


def pick_format(
    chat_format: Any,
    tokenizer: Any,
    template: str | None = None,
    variables: Mapping[str, str] | None = None,
    guessed_for: str | None = None,
) -> ChatFormat:
    """The format named, or the object given; None is the template's, else the family's. `guessed_for`: the
    checkpoint whose format nothing tells, for a log line. LlamaError for a name or object that is none.
    """
    if chat_format is None and template is not None:
        return TemplateFormat(template, tokenizer, variables)
    if chat_format is None:
        found = family_format(tokenizer)
        return found if found is not LLAMA2 or guessed_for is None else GuessedLlama2(guessed_for)
    if isinstance(chat_format, str):
        return _by_name(chat_format, tokenizer, template, variables)
    if all(hasattr(chat_format, name) for name in ("check", "is_unsafe", "encode", "truncate", "stop_ids")):
        return chat_format  # type: ignore[no-any-return]
    raise LlamaError(
        f"chat_format={chat_format!r:.80} must be one of {', '.join(FORMATS)}, or an object with the methods of "
        f"llama.chat.ChatFormat"
    )


def _by_name(name: str, tokenizer: Any, template: str | None, variables: Mapping[str, str] | None) -> ChatFormat:
    if name == "llama2":
        return LLAMA2
    if name == "llama3":
        return llama3.Llama3Format(tokenizer)
    if name == "chatml":
        return chatml.ChatMLFormat(tokenizer)
    if name != "template":
        raise LlamaError(f"chat_format={name!r:.60} must be one of {', '.join(FORMATS)}")
    if template is None:
        raise LlamaError(
            'chat_format="template": the checkpoint has no chat template (chat_template.jinja, or "chat_template" in '
            f"tokenizer_config.json); name one of {', '.join(FORMATS[:-1])}"
        )
    found = TemplateFormat(template, tokenizer, variables)
    found.prepare()
    return found
