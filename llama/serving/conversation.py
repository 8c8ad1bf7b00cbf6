"""A dialog that goes on: turns, the window, and a cache that keeps what did not change."""

from collections.abc import Iterator
from typing import Any

from typing_extensions import Unpack

from ..arguments import check_integer, check_text
from ..chat import SPECIAL_TAGS, Dialog, Message
from ..engine.options import Options, prompt_budget
from ..engine.results import Stream
from ..errors import LlamaError
from ..generation import Llama


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
        if text is not None:
            check_text("system", text, "it must be a text or None")
        if text and self.generator.chat_format.is_unsafe(
            [{"role": "system", "content": text}], self.generator.tokenizer
        ):
            raise LlamaError(f"the system text {text!r:.60} holds one of {', '.join(SPECIAL_TAGS)}: leave it out")
        self._system = text or None

    def reset(self) -> None:
        """Forget all turns, not the system text."""
        self.dialog = []

    def load(self, messages: Any) -> None:
        """Go on with another dialog, which ends with an answer. LlamaError, and nothing changed, where it is none."""
        chat_format = self.generator.chat_format
        is_list = isinstance(messages, (list, tuple))
        chat_format.check([*messages, {"role": "user", "content": ""}] if is_list else messages)
        if chat_format.is_unsafe(messages, self.generator.tokenizer):
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
    ) -> Stream[str]:
        """The answer to `content` in chunks. A stream that is closed early keeps what was said so far as the answer.

        A question with special tags is answered with `UNSAFE_ERROR`; neither it nor a turn whose answer holds such tags
        is kept, since no later prompt could hold it. LlamaError, and nothing changed, where it does not fit alone.
        """
        generator, chat_format = self.generator, self.generator.chat_format
        question: Message = {"role": "user", "content": check_text("content", content, "ask takes one text")}
        if max_gen_len is not None:
            check_integer("max_gen_len", max_gen_len, 1, "None or an integer from 1 up: an answer needs a token")
        settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p, **options}
        self._begin()
        if chat_format.is_unsafe([question], generator.tokenizer):
            return generator.stream_prompt(None, max_gen_len, False, settings)
        budget = prompt_budget(generator.model.params.max_seq_len, max_gen_len)
        dialog, dropped = chat_format.truncate(generator.tokenizer, [*self.messages(), question], budget)
        prompt = chat_format.encode(generator.tokenizer, dialog)
        stream = generator.stream_prompt(prompt, max_gen_len, False, settings, reuse=True)
        return Stream(self._answer(stream, dialog, dropped), stream.rows, stream.request)

    def _answer(self, stream: Stream[str], dialog: Dialog, dropped: int) -> Iterator[str]:
        """The chunks of one answer; when they end, for whatever reason but an error, the turn is kept."""
        answer, [row] = "", stream.rows
        try:
            with stream:
                for chunk in stream:
                    answer += chunk
                    yield chunk
        except (GeneratorExit, KeyboardInterrupt):
            self._keep(dialog, dropped, answer)
            raise
        finally:
            self.prefilled = len(row.prompt) - row.reused
            self.completion_tokens = len(row.output)
            self.finish_reason = row.finish_reason
        self._keep(dialog, dropped, answer)

    def _keep(self, dialog: Dialog, dropped: int, answer: str) -> None:
        """The dialog after a turn: what was left of it for the prompt, and the answer."""
        reply: Message = {"role": "assistant", "content": answer}
        turns = [message for message in dialog if message["role"] != "system"]
        self.dropped, self.kept = dropped, not self.generator.chat_format.is_unsafe([reply], self.generator.tokenizer)
        self.dialog = [*turns, reply] if self.kept else turns[:-1]
