"""A dialog that goes on: turns, the window, and a cache that keeps what did not change."""

from collections.abc import Iterator
from typing import Any

from typing_extensions import Unpack

from .chat import UNSAFE_ERROR, Dialog, Message, check_dialog, encode_dialog, fit_dialog, is_unsafe
from .generation import Llama, Options


class Conversation:
    """One dialog with a generator, streamed turn by turn.

    Each turn feeds only what follows the longest common prefix of the new prompt's ids and what cache row 0 holds; any
    other call on the generator in between starts it afresh. When the window is full the oldest turns are dropped, the
    system text stays; `dropped` says how many messages the last turn lost.
    """

    def __init__(self, generator: Llama, system: str | None = None) -> None:
        self.generator = generator
        self.dialog: Dialog = []
        self.dropped = 0
        self.prefilled = 0  # positions of the last prompt that had to be fed
        self.completion_tokens = 0  # of the last answer
        self.system = system

    @property
    def system(self) -> str | None:
        """The text that goes before the first question; setting it keeps the turns."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = text or None

    def reset(self) -> None:
        """Forget all turns, not the system text."""
        self.dialog = []

    def load(self, messages: Any) -> None:
        """Go on with another dialog, which ends with an answer. LlamaError, and nothing changed, where it is none."""
        check_dialog([*messages, {"role": "user", "content": ""}] if isinstance(messages, list) else messages, 0)
        lead = [message["content"] for message in messages[:1] if message["role"] == "system"]
        self.system = lead[0] if lead else None
        self.dialog = list(messages[len(lead) :])

    def messages(self) -> Dialog:
        """The whole dialog, system text first."""
        lead: Dialog = [] if self._system is None else [{"role": "system", "content": self._system}]
        return lead + self.dialog

    def ask(
        self,
        content: str,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        **options: Unpack[Options],
    ) -> Iterator[str]:
        """The answer to `content` in pieces. An iterator that is closed early keeps what was said so far as the answer.

        A text with special tags is answered with `UNSAFE_ERROR` and not kept. LlamaError where it does not fit alone.
        """
        self.dropped = self.prefilled = self.completion_tokens = 0
        question: Message = {"role": "user", "content": content}
        if is_unsafe([*self.messages(), question]):
            yield UNSAFE_ERROR
            return
        self.dialog.append(question)
        pieces: list[str] = []
        failed = False
        try:
            for piece in self._answer(temperature, top_p, max_gen_len, options):
                pieces.append(piece)
                yield piece
        except Exception:
            failed = True
            raise
        finally:
            if failed:
                self.dialog.pop()
            else:
                self.dialog.append({"role": "assistant", "content": "".join(pieces)})

    def _answer(self, temperature: float, top_p: float, max_gen_len: int | None, options: Any) -> Iterator[str]:
        """Drop what does not fit, then stream from the end of the common prefix."""
        dialog, self.dropped = fit_dialog(self.generator.tokenizer, self.messages(), self.generator.room(max_gen_len))
        self.dialog = [message for message in dialog if message["role"] != "system"]
        prompt = encode_dialog(self.generator.tokenizer, dialog)
        decoding = self.generator.decoding([prompt], max_gen_len, temperature, top_p, options=options)
        try:
            yield from self.generator.pieces(self.generator.run(decoding, reuse=True), options)
        finally:
            self.prefilled = len(prompt) - decoding.reused
            self.completion_tokens = len(decoding.rows[0].output)
