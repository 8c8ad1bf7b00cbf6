"""The checkpoint's own chat template, a Jinja program, rendered as transformers does and kept apart from the texts."""

import json
from collections.abc import Mapping
from typing import Any

from ..errors import LlamaError
from .dialog import ROLES, Dialog, check_messages, check_not_empty, drop_oldest
from .renderer import RenderError, TemplateProcess
from .segments import encode_segments, find_specials, special_ids_of, special_pattern

ANSWER = "Marigold"  # a word that no template writes itself


class TemplateFormat:
    """A Jinja chat template. Control pieces are those in the template's own text and in `variables` (such as
    bos_token); text of messages stays text whatever the template does with it, and where the two cannot be told apart
    the dialog is refused. Roles are system, user, assistant and whatever other the template names.

    Further keys of a message go to the template too. What is wrong with a template is a LlamaError of the first dialog,
    or of `prepare`.
    """

    def __init__(self, source: str, tokenizer: Any, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._names = list(special_ids_of(tokenizer))
        self._variables = {**_variables(tokenizer), **(variables or {})}
        self._process = TemplateProcess(source, self._names)
        try:
            self.stop_ids = self._end_of_turn(special_ids_of(tokenizer))
        except LlamaError:  # who completes texts need not know
            self.stop_ids = frozenset()

    def prepare(self) -> None:
        """LlamaError where the template cannot be used at all."""
        self._named(None)

    def _named(self, index: int | None) -> frozenset[str]:
        """The roles that the template names."""
        try:
            return self._process.roles()
        except LlamaError as error:
            raise self._complaint(error, index) from error

    def _complaint(self, error: Exception, index: int | None, place: str = "") -> LlamaError:
        """An error of the template's as ours."""
        if not isinstance(error, RenderError):  # a missing package
            return LlamaError(str(error))
        where = "" if index is None else f"dialog {index}{place}: "
        if error.raised:
            return LlamaError(f"{where}the checkpoint's chat template refuses it: {error}")
        return LlamaError(f"{where}the checkpoint's chat template cannot be used: {error}; choose another chat_format")

    def check(self, dialog: Any, index: int = 0) -> None:
        """As `ChatFormat.check`; the template's own rules are met in `encode`."""
        named = self._named(index) - set(ROLES)
        check_messages(dialog, index, (*ROLES, *sorted(named)))
        check_not_empty(dialog, index)

    def is_unsafe(self, dialog: Dialog, tokenizer: Any = None) -> bool:
        """As `ChatFormat.is_unsafe`: no text can pose as a turn."""
        return False

    def encode(self, tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
        """As `ChatFormat.encode`; LlamaError also where the template refuses the dialog, or cannot be used safely."""
        self.check(dialog, index)
        messages = [_plain(message, f"dialog {index}, message {i}") for i, message in enumerate(dialog)]
        try:
            parts = self._render(messages)
            parts = self._settle(parts, messages)
        except LlamaError as error:
            place = self._place(messages, error) if isinstance(error, RenderError) and error.raised else ""
            raise self._complaint(error, index, place) from error
        specials = special_ids_of(tokenizer)
        try:
            return encode_segments(tokenizer, _as_segments(parts, self._names, specials))
        except LlamaError as error:
            raise LlamaError(f"dialog {index}: {error}") from error

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[str | int]:
        return self._process.render(messages, self._variables, add_generation_prompt)

    def _settle(self, parts: list[str | int], messages: list[dict[str, Any]]) -> list[str | int]:
        """The prompt, and with it control pieces that the template puts together of smaller ones ('<|' + role + '|>').

        Those are told from text that poses as one by rendering messages without any text: RenderError where that text
        could have a part in them.
        """
        posing = _posing(parts, self._names)
        if not posing:
            return parts
        built = _posing(self._render([_without_text(message) for message in messages]), self._names)
        if not built:
            return parts
        texts = [text for message in messages for text in _texts(message)]
        if built != posing or any(find_specials(self._names, text) for text in texts):
            raise RenderError(f"it puts {built[0]!r:.60} together of pieces, so that text in a message could do so too")
        return [part for piece in parts for part in _split(piece, self._names)]

    def _place(self, messages: list[dict[str, Any]], error: Exception) -> str:
        """ ", message N" for the first message with which the template complains as it does."""
        low, high = 1, len(messages)
        while low < high:
            middle = (low + high) // 2
            try:
                self._render(messages[:middle])
            except LlamaError as earlier:
                if str(earlier) == str(error):
                    high = middle
                    continue
            low = middle + 1
        return f", message {high - 1}"

    def truncate(self, tokenizer: Any, dialog: Dialog, budget: int) -> tuple[Dialog, int]:
        """As `ChatFormat.truncate`."""
        self.check(dialog)
        return drop_oldest(dialog, lambda rest: len(self.encode(tokenizer, rest)) <= budget)

    def _end_of_turn(self, specials: dict[str, int]) -> frozenset[int]:
        """The control piece that the template puts behind an answer, where it puts one at once."""
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}]
        parts = self._settle(self._render(messages, add_generation_prompt=False), messages)
        for part, behind in zip(reversed(parts[:-1]), reversed(parts[1:]), strict=True):
            if isinstance(part, str) and ANSWER in part:
                found = isinstance(behind, int) and not part.rpartition(ANSWER)[2].strip()
                return frozenset([specials[self._names[int(behind)]]] if found else [])
        return frozenset()


def _variables(tokenizer: Any) -> dict[str, str]:
    """bos_token, eos_token and so on, as far as the tokenizer knows them."""
    names = {token: name for name, token in special_ids_of(tokenizer).items()}
    ids = {
        name: getattr(tokenizer, name.replace("token", "id"), None) for name in ("bos_token", "eos_token", "pad_token")
    }
    return {name: names[token] for name, token in ids.items() if token in names}


def _plain(message: Any, where: str) -> dict[str, Any]:
    """A message as JSON has it, without keys whose value is None, as templates see it. LlamaError for others."""
    items = dict(message) if isinstance(message, Mapping) else {key: message[key] for key in ("role", "content")}
    try:
        return json.loads(json.dumps({key: value for key, value in items.items() if value is not None}))  # type: ignore[no-any-return]
    except (TypeError, ValueError, RecursionError) as error:
        raise LlamaError(f"{where} cannot be given to a template: {error!s:.200}; it may hold what JSON can") from error


def _texts(value: Any, key: Any = None) -> list[str]:
    """The texts in a message, but for its role."""
    if isinstance(value, dict):
        return [text for name, item in value.items() for text in [*_texts(item, name), str(name)]]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) and key != "role" else []


def _without_text(value: Any, key: Any = None) -> Any:
    """The same message with other texts, in which nothing can be hidden."""
    if isinstance(value, dict):
        return {name: _without_text(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_text(item) for item in value]
    return "x" if isinstance(value, str) and key != "role" else value


def _posing(parts: list[str | int], names: list[str]) -> list[str]:
    """What looks like a control piece in the texts of a prompt."""
    return [name for part in parts if isinstance(part, str) for name in find_specials(names, part)]


def _split(part: str | int, names: list[str]) -> list[str | int]:
    """A text with what looks like control pieces as their places in the list."""
    if isinstance(part, int):
        return [part]
    pieces = special_pattern(tuple(names)).split(part)
    return [names.index(piece) if i % 2 else piece for i, piece in enumerate(pieces) if piece]


def _as_segments(parts: list[str | int], names: list[str], specials: dict[str, int]) -> list[str | int]:
    """Places in the list as ids; what this tokenizer has no piece for is text."""
    return [part if isinstance(part, str) else specials.get(names[part], names[part]) for part in parts]
