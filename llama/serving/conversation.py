"""A dialog that goes on: turns, the window, and a cache that keeps what did not change."""

import contextlib
from collections.abc import Iterator
from typing import Any

from typing_extensions import Unpack

from ..chat import SPECIAL_TAGS, UNSAFE_ERROR, Dialog, Message, check_dialog, encode_dialog, fit_dialog, is_unsafe
from ..errors import LlamaError
from ..generation import Llama, Options


class Conversation:
    """One dialog with a generator, streamed turn by turn.

    Each turn feeds only what follows the longest common prefix of the new prompt's ids and what cache row 0 holds; any
    other call on the generator in between starts it afresh. When the window is full the oldest turns are dropped, the
    system text stays; `dropped` says how many messages the last turn lost.
    """

    def __init__(self, generator: Llama, system: str | None = None) -> None:
        self.generator = generator
        self.dialog: Dialog = []
        self.system = system
        self._begin()

    def _begin(self) -> None:
        """What is known of a turn before it has begun."""
        self.dropped = 0  # old messages that had to go
        self.prefilled = 0  # positions of the prompt that had to be fed
        self.completion_tokens = 0  # of the answer, a stop token among them
        self.finish_reason: str | None = None  # None where the answer was stopped from outside
        self.kept = False  # whether question and answer stand in the dialog

    @property
    def system(self) -> str | None:
        """The text that goes before the first question; setting it keeps the turns. LlamaError for special tags."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text and is_unsafe([{"role": "system", "content": text}]):
            raise LlamaError(f"the system text {text!r:.60} holds one of {', '.join(SPECIAL_TAGS)}: leave it out")
        self._system = text or None

    def reset(self) -> None:
        """Forget all turns, not the system text."""
        self.dialog = []

    def load(self, messages: Any) -> None:
        """Go on with another dialog, which ends with an answer. LlamaError, and nothing changed, where it is none."""
        check_dialog([*messages, {"role": "user", "content": ""}] if isinstance(messages, list) else messages, 0)
        if is_unsafe(messages):
            raise LlamaError(f"the dialog holds one of {', '.join(SPECIAL_TAGS)}: leave it out")
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

        A question with special tags is answered with `UNSAFE_ERROR`; neither it nor a turn whose answer holds such tags
        is kept, since no later prompt could hold it. LlamaError, and nothing changed, where it does not fit alone.
        """
        self._begin()
        question: Message = {"role": "user", "content": content}
        if is_unsafe([question]):
            yield UNSAFE_ERROR
            return
        tokenizer, room = self.generator.tokenizer, self.generator.room(max_gen_len)
        dialog, dropped = fit_dialog(tokenizer, [*self.messages(), question], room)
        prompt = encode_dialog(tokenizer, dialog)
        decoding = self.generator.decoding([prompt], max_gen_len, temperature, top_p, options=options)
        answer = ""
        try:
            steps = self.generator.run(decoding, reuse=True)
            with contextlib.closing(self.generator.pieces(steps, options)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    answer += piece
                    yield piece
        except (GeneratorExit, KeyboardInterrupt):
            self._keep(dialog, dropped, answer)
            raise
        finally:
            self.prefilled = len(prompt) - decoding.reused
            self.completion_tokens = len(decoding.rows[0].output)
            self.finish_reason = decoding.rows[0].finish_reason
        self._keep(dialog, dropped, answer)

    def _keep(self, dialog: Dialog, dropped: int, answer: str) -> None:
        """The dialog after a turn: what was left of it for the prompt, and the answer."""
        reply: Message = {"role": "assistant", "content": answer}
        turns = [message for message in dialog if message["role"] != "system"]
        self.dropped, self.kept = dropped, not is_unsafe([reply])
        self.dialog = [*turns, reply] if self.kept else turns[:-1]
