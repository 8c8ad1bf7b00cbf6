"""Llama 2's chat format, as published, with its guard against special tags."""

from typing import Any

from ..errors import LlamaError
from .dialog import Dialog, check_messages, check_not_empty

B_INST, E_INST = "[INST]", "[/INST]"
B_SYS, E_SYS = "<<SYS>>\n", "\n<</SYS>>\n\n"
SPECIAL_TAGS = [B_INST, E_INST, "<<SYS>>", "<</SYS>>"]
UNSAFE_ERROR = "Error: special tags are not allowed as part of the prompt."


class Llama2Format:
    """[INST] <<SYS>> ... <</SYS>> question [/INST] answer; every finished turn is a text between BOS and EOS."""

    stop_ids: frozenset[int] = frozenset()

    def check(self, dialog: Any, index: int = 0) -> None:
        """As `ChatFormat.check`: [system,] user, assistant, user, ..., user."""
        check_messages(dialog, index)
        check_not_empty(dialog, index)
        roles = [message["role"] for message in dialog]
        first = 1 if roles[:1] == ["system"] else 0
        if len(roles) == first == 1:
            raise LlamaError(f"dialog {index} has a system message only: it needs a message of the user to answer")
        for i, role in enumerate(roles[first:], first):
            expected = "user" if (i - first) % 2 == 0 else "assistant"
            if role != expected:
                raise LlamaError(
                    f"dialog {index}, message {i}: role is {role!r}, expected {expected!r}: "
                    f"after an optional system message, user and assistant take turns, the user first"
                )
        if roles[-1] != "user":
            raise LlamaError(
                f"dialog {index}, message {len(roles) - 1}: the last message must be from the user, not assistant"
            )

    def is_unsafe(self, dialog: Dialog, tokenizer: Any = None) -> bool:
        """As `ChatFormat.is_unsafe`: whether any message holds one of the tags."""
        texts = [message["content"] for message in dialog]
        texts += [_normalized(tokenizer, text) for text in texts]
        return any(tag in text for text in texts for tag in SPECIAL_TAGS)

    def encode(self, tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
        """As `ChatFormat.encode`."""
        *finished, last = self._turns(tokenizer, dialog, index)
        ids: list[int] = []
        for turn in finished:
            ids += [i for i in tokenizer.encode(turn, bos=True, eos=True) if i is not None]  # an eos_id taken away
        return ids + tokenizer.encode(last, bos=True, eos=False)  # type: ignore[no-any-return]

    def truncate(self, tokenizer: Any, dialog: Dialog, budget: int) -> tuple[Dialog, int]:
        """As `ChatFormat.truncate`; each turn is encoded once, and once more where it could come first."""
        dialog = list(dialog)  # a tuple is good too
        lead = dialog[:1] if dialog and dialog[0]["role"] == "system" else []
        turns = dialog[len(lead) :]
        *finished, last = self._turns(tokenizer, turns)
        sizes = [len(tokenizer.encode(turn, bos=True, eos=True)) for turn in finished]
        behind = sum(sizes) + len(tokenizer.encode(last, bos=True, eos=False))
        for i, size in enumerate(sizes):
            kept = turns[2 * i :]
            first = (
                len(tokenizer.encode(self._turns(tokenizer, lead + kept[:3])[0], bos=True, eos=True)) if lead else size
            )
            behind -= size
            if first + behind <= budget:
                return lead + kept, 2 * i
        return lead + turns[-1:], len(turns) - 1

    def _turns(self, tokenizer: Any, dialog: Dialog, index: int = 0) -> list[str]:
        """The prompt's texts: each question with its answer, last the question that waits for one."""
        self.check(dialog, index)
        if self.is_unsafe(dialog, tokenizer):
            raise LlamaError(f"dialog {index}: {UNSAFE_ERROR} Leave out {', '.join(SPECIAL_TAGS)}")
        texts = [message["content"] for message in dialog]
        if dialog[0]["role"] == "system":
            texts = [B_SYS + texts[0] + E_SYS + texts[1], *texts[2:]]
        pairs = zip(texts[0::2], texts[1::2], strict=False)
        finished = [f"{B_INST} {user.strip()} {E_INST} {assistant.strip()} " for user, assistant in pairs]
        return [*finished, f"{B_INST} {texts[-1].strip()} {E_INST}"]


LLAMA2 = Llama2Format()


def encode_dialog(tokenizer: Any, dialog: Dialog, index: int = 0) -> list[int]:
    """The ids of Llama 2's prompt for a dialog; `index` names it in errors. LlamaError as in `ChatFormat.encode`."""
    return LLAMA2.encode(tokenizer, dialog, index)


def _normalized(tokenizer: Any, text: str) -> str:
    """The text as the vocabulary's own rules rewrite it before it is cut into pieces: NFKC makes full-width brackets
    plain ones. Where the tokenizer has no such rules, or the text is none that UTF-8 can write, the text itself.
    """
    normalize = getattr(getattr(tokenizer, "sp_model", None), "Normalize", None)
    try:
        text.encode()
    except UnicodeError:
        return text
    return text if normalize is None else str(normalize(text))
