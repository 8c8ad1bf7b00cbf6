"""ChatML: <|im_start|>role, a newline, the text, <|im_end|>, a newline."""

from typing import Any

from ..errors import LlamaError
from .dialog import ROLES, Dialog, FreeTurns
from .segments import encode_segments, special_ids_of

START, END = "<|im_start|>", "<|im_end|>"


class ChatMLFormat(FreeTurns):
    """Turns between the control pieces <|im_start|> and <|im_end|>, which no text can become; texts as they are, the
    roles' order free, no system text of its own.
    """

    roles = (*ROLES, "tool")

    def __init__(self, tokenizer: Any) -> None:
        specials = special_ids_of(tokenizer)
        missing = [name for name in (START, END) if name not in specials]
        if missing:
            raise LlamaError(f"the chat format chatml needs {', '.join(missing)}, which the vocabulary lacks")
        self.stop_ids = frozenset([specials[END]])

    def encode(self, tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
        """As `ChatFormat.encode`."""
        self.check(dialog, index)
        specials = special_ids_of(tokenizer)
        start, end = specials[START], specials[END]
        segments: list[str | int] = []
        for message in dialog:
            segments += [start, f"{message['role']}\n{message['content']}", end, "\n"]
        try:
            return encode_segments(tokenizer, [*segments, start, "assistant\n"])
        except LlamaError as error:
            raise LlamaError(f"dialog {index}: {error}") from error
