"""Llama 2's chat format: a dialog to ids, with the guard against its special tags."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypedDict

from .errors import LlamaError

Role: TypeAlias = Literal["system", "user", "assistant"]


class Message(TypedDict):
    """One turn of a dialog: who speaks, and the text."""

    role: Role
    content: str


Dialog: TypeAlias = list[Message]

B_INST, E_INST = "[INST]", "[/INST]"
B_SYS, E_SYS = "<<SYS>>\n", "\n<</SYS>>\n\n"
SPECIAL_TAGS = [B_INST, E_INST, "<<SYS>>", "<</SYS>>"]
UNSAFE_ERROR = "Error: special tags are not allowed as part of the prompt."


def is_unsafe(dialog: Dialog) -> bool:
    """Whether any message of a checked dialog holds one of the format's own tags, and so could pose as another turn."""
    return any(tag in message["content"] for message in dialog for tag in SPECIAL_TAGS)


def check_dialog(dialog: Any, index: int) -> None:
    """LlamaError, naming dialog and message, unless it is [system,] user, assistant, user, ..., user."""
    where = f"dialog {index}"
    if not isinstance(dialog, (list, tuple)):
        raise LlamaError(f"{where} is a {type(dialog).__name__}; it must be a list of messages")
    for place, message in enumerate(dialog):
        _check_message(message, f"{where}, message {place}")
    roles = [message["role"] for message in dialog]
    first = 1 if roles[:1] == ["system"] else 0
    if len(roles) == first:
        what = "has a system message only" if first else "is empty"
        raise LlamaError(f"{where} {what}: it needs a message of the user to answer")
    for place, role in enumerate(roles[first:], first):
        expected = "user" if (place - first) % 2 == 0 else "assistant"
        if role != expected:
            raise LlamaError(
                f"{where}, message {place}: role is {role!r}, expected {expected!r}: "
                f"after an optional system message, user and assistant take turns, the user first"
            )
    if roles[-1] != "user":
        raise LlamaError(f"{where}, message {len(roles) - 1}: the last message must be from the user, not assistant")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise LlamaError(f'{where} is {message!r:.60}; it must be a dict with "role" and "content"')
    if message["role"] not in ("system", "user", "assistant"):
        raise LlamaError(f"{where}: role {message['role']!r} is not 'system', 'user' or 'assistant'")
    if not isinstance(message["content"], str):
        raise LlamaError(f"{where}: content is a {type(message['content']).__name__}, it must be a str")


def encode_dialog(tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
    """The ids of Llama 2's prompt for a dialog; every finished turn is a text of its own between BOS and EOS.

    LlamaError for a dialog that cannot be answered, or with `UNSAFE_ERROR` where a message holds a special tag;
    `index` names the dialog in it. The dialog is not changed.
    """
    *finished, last = _turns(dialog, index)
    ids: list[int] = []
    for turn in finished:
        ids += tokenizer.encode(turn, bos=True, eos=True)
    return ids + tokenizer.encode(last, bos=True, eos=False)  # type: ignore[no-any-return]


def _turns(dialog: Dialog, index: int = 0) -> list[str]:
    """The prompt's texts: each question with its answer, last the question that waits for one. Errors as above."""
    check_dialog(dialog, index)
    if is_unsafe(dialog):
        raise LlamaError(f"dialog {index}: {UNSAFE_ERROR} Leave out {', '.join(SPECIAL_TAGS)}")
    texts = [message["content"] for message in dialog]
    if dialog[0]["role"] == "system":
        texts = [B_SYS + texts[0] + E_SYS + texts[1], *texts[2:]]
    pairs = zip(texts[0::2], texts[1::2], strict=False)
    finished = [f"{B_INST} {user.strip()} {E_INST} {assistant.strip()} " for user, assistant in pairs]
    return [*finished, f"{B_INST} {texts[-1].strip()} {E_INST}"]


def fit_dialog(tokenizer: Any, dialog: Dialog, room: int) -> tuple[Dialog, int]:
    """The dialog without the oldest turns that do not fit in `room` tokens, and how many messages were dropped.

    The system text and the last question stay, also where they alone are too long. Every turn is encoded once, and
    once more behind the system text where it could come first. Errors as in `encode_dialog`.
    """
    lead = dialog[:1] if dialog and dialog[0]["role"] == "system" else []
    turns = dialog[len(lead) :]
    *finished, last = _turns(turns)
    sizes = [len(tokenizer.encode(turn, bos=True, eos=True)) for turn in finished]
    behind = sum(sizes) + len(tokenizer.encode(last, bos=True, eos=False))
    for place, size in enumerate(sizes):
        kept = turns[2 * place :]
        first = len(tokenizer.encode(_turns(lead + kept[:3])[0], bos=True, eos=True)) if lead else size
        behind -= size
        if first + behind <= room:
            return lead + kept, 2 * place
    return lead + turns[-1:], len(turns) - 1
