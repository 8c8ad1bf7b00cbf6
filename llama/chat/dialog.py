"""What every chat format shares: messages and their checks, and which turns go when a dialog is too long."""

from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from ..errors import LlamaError

Role: TypeAlias = Literal["system", "user", "assistant"]


class Message(TypedDict):
    """One turn of a dialog: who speaks, and the text."""

    role: Role
    content: str


Dialog: TypeAlias = list[Message]

ROLES = ("system", "user", "assistant")  # those that every format has


class ChatFormat(Protocol):
    """How the dialogs of a family of models become ids; belongs to a checkpoint."""

    stop_ids: frozenset[int]  # that end an answer, beside the tokenizer's

    def check(self, dialog: Any, index: int = 0) -> None:
        """LlamaError, naming dialog `index` and the message, unless the dialog can be answered."""
        ...

    def is_unsafe(self, dialog: Dialog, tokenizer: Any = None) -> bool:
        """Whether a checked dialog holds text that could pose as another turn, as it is or as `tokenizer` reads it."""
        ...

    def encode(self, tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
        """The prompt's ids. LlamaError as in `check`, and for an unsafe dialog. The dialog is not changed."""
        ...

    def truncate(self, tokenizer: Any, dialog: Dialog, budget: int) -> tuple[Dialog, int]:
        """The dialog without the oldest turns that do not fit in `budget` tokens, and how many messages were dropped.

        The system text and the last question stay, also where they alone are too long. Errors as in `encode`.
        """
        ...


def check_messages(dialog: Any, index: int, roles: Collection[str] = ROLES) -> None:
    """LlamaError unless `dialog` is a list of messages, each with one of `roles` and a text."""
    where = f"dialog {index}"
    if not isinstance(dialog, (list, tuple)):
        raise LlamaError(f"{where} is a {type(dialog).__name__}; it must be a list of messages")
    for i, message in enumerate(dialog):
        _check_message(message, f"{where}, message {i}", roles)


def check_not_empty(dialog: Any, index: int) -> None:
    """LlamaError where a checked dialog has no message."""
    if not dialog:
        raise LlamaError(f"dialog {index} is empty: it needs a message of the user to answer")


def _check_message(message: Any, where: str, roles: Collection[str]) -> None:
    """Anything with `message["role"]` and `message["content"]` is a message."""
    try:
        role, content = message["role"], message["content"]
    except (TypeError, KeyError, IndexError, AttributeError):
        raise LlamaError(f'{where} is {message!r:.60}; it must be a dict with "role" and "content"') from None
    if not isinstance(role, str) or role not in roles:
        *first, last = [repr(name) for name in roles]
        raise LlamaError(f"{where}: role {role!r:.60} is not {', '.join(first)} or {last}")
    if not isinstance(content, str):
        raise LlamaError(f"{where}: content is a {type(content).__name__}, it must be a str")


def drop_oldest(dialog: Dialog, fits: Callable[[Dialog], bool]) -> tuple[Dialog, int]:
    """The dialog with as few of its oldest turns left out as make it fit, and how many messages those are.

    A turn goes from one message of the user's to the next; what leads (system texts) and the last turn stay. A search
    by halves, since a dialog with fewer turns is shorter.
    """
    messages = list(dialog)
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    n_lead = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    lead, cuts = messages[:n_lead], [n_lead, *(start for start in starts if start > n_lead)]
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(lead + messages[cuts[middle] :]):
            high = middle
        else:
            low = middle + 1
    return lead + messages[cuts[low] :], cuts[low] - n_lead


class FreeTurns:
    """What formats share whose turns stand between control pieces, which no text can become: `roles` in any order."""

    roles: tuple[str, ...] = ROLES

    def check(self, dialog: Any, index: int = 0) -> None:
        """As `ChatFormat.check`."""
        check_messages(dialog, index, self.roles)
        check_not_empty(dialog, index)

    def is_unsafe(self, dialog: Dialog, tokenizer: Any = None) -> bool:
        """As `ChatFormat.is_unsafe`: no text can pose as a turn."""
        return False

    def encode(self, tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
        """As `ChatFormat.encode`."""
        raise NotImplementedError

    def truncate(self, tokenizer: Any, dialog: Dialog, budget: int) -> tuple[Dialog, int]:
        """As `ChatFormat.truncate`."""
        self.check(dialog)
        return drop_oldest(dialog, lambda rest: len(self.encode(tokenizer, rest)) <= budget)
