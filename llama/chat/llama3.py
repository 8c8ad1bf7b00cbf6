"""Llama 3's chat format, as Meta's own package writes it: headers of control pieces, which no text can become."""

from typing import Any

from ..errors import LlamaError
from .dialog import ROLES, Dialog, FreeTurns
from .segments import encode_text, special_ids_of

BEGIN, HEADER, HEADER_END = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"
END_OF_TURN, END_OF_MESSAGE = "<|eot_id|>", "<|eom_id|>"
PIECES = (BEGIN, HEADER, HEADER_END, END_OF_TURN)


class Llama3Format(FreeTurns):
    """<|start_header_id|>role<|end_header_id|>, an empty line, the text, <|eot_id|>; header, empty line and text are
    encoded apart, texts stripped. "tool" is written "ipython". The roles' order is free, as published.

    Hugging Face's template of Llama 3.1 differs: it always writes a system text, with a date. `chat_format="template"`.
    """

    roles = (*ROLES, "tool", "ipython")

    def __init__(self, tokenizer: Any) -> None:
        specials = special_ids_of(tokenizer)
        missing = [name for name in PIECES if name not in specials]
        if missing:
            raise LlamaError(f"the chat format llama3 needs {', '.join(missing)}, which the vocabulary lacks")
        self.stop_ids = frozenset(specials[name] for name in (END_OF_TURN, END_OF_MESSAGE) if name in specials)

    def encode(self, tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
        """As `ChatFormat.encode`."""
        self.check(dialog, index)
        specials = special_ids_of(tokenizer)
        control = frozenset(specials.values())

        def text(content: str) -> list[int]:
            return encode_text(tokenizer, content, control)

        def header(role: str) -> list[int]:
            name = "ipython" if role == "tool" else role
            return [specials[HEADER], *text(name), specials[HEADER_END], *text("\n\n")]

        ids = [specials[BEGIN]]
        for message in dialog:
            ids += [*header(message["role"]), *text(message["content"].strip()), specials[END_OF_TURN]]
        return ids + header("assistant")
