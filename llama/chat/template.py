"""The checkpoint's own chat template, a Jinja program, rendered as transformers does and kept apart from the texts."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import LlamaError
from .built import settle_built
from .dialog import ROLES, Dialog, FreeTurns, check_messages, check_not_empty
from .renderer import RenderError, TemplateProcess
from .segments import encode_segments, special_ids_of

ANSWER = "Marigold"  # a word that no template writes itself


class TemplateFormat(FreeTurns):
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

    def encode(self, tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
        """As `ChatFormat.encode`; LlamaError also where the template refuses the dialog, or cannot be used safely."""
        self.check(dialog, index)
        messages = [_plain(message, f"dialog {index}, message {i}") for i, message in enumerate(dialog)]
        try:
            parts = settle_built(self._render, messages, self._names)
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

    def _end_of_turn(self, specials: dict[str, int]) -> frozenset[int]:
        """The control piece that the template puts behind an answer, where it puts one at once."""
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}]
        parts = settle_built(partial(self._render, add_generation_prompt=False), messages, self._names)
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


def _as_segments(parts: list[str | int], names: list[str], specials: dict[str, int]) -> list[str | int]:
    """Places in the list as ids; what this tokenizer has no piece for is text."""
    return [part if isinstance(part, str) else specials.get(names[part], names[part]) for part in parts]
