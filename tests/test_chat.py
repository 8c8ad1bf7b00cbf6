"""Dialogs: the published prompt, the checks, and the guard against special tags."""

import copy
from pathlib import Path
from typing import Any

import pytest

from llama import chat
from llama.chat import B_INST, E_INST, LLAMA2, UNSAFE_ERROR, Dialog, encode_dialog
from llama.errors import LlamaError
from llama.tokenizer import Tokenizer

SYSTEM: Any = {"role": "system", "content": "be small"}
USER: Any = {"role": "user", "content": " rain\n"}
ASSISTANT: Any = {"role": "assistant", "content": " fell "}
LATER: Any = {"role": "user", "content": "soon?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(Path(__file__).parent / "golden" / "mha" / "tokenizer.model"))


class Recorder:
    """A stub tokenizer that notes each text; the published package calls it with these keywords."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool, bool]] = []

    def encode(self, s: str, *, bos: bool, eos: bool) -> list[int]:
        self.calls.append((s, bos, eos))
        return [len(self.calls)]


def test_published_constants() -> None:
    assert (chat.B_INST, chat.E_INST) == ("[INST]", "[/INST]")
    assert (chat.B_SYS, chat.E_SYS) == ("<<SYS>>\n", "\n<</SYS>>\n\n")
    assert chat.SPECIAL_TAGS == ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"]
    assert chat.UNSAFE_ERROR == "Error: special tags are not allowed as part of the prompt."


def test_the_published_prompt_word_for_word() -> None:
    recorder = Recorder()
    assert encode_dialog(recorder, [SYSTEM, USER, ASSISTANT, LATER]) == [1, 2]
    assert recorder.calls == [
        ("[INST] <<SYS>>\nbe small\n<</SYS>>\n\n rain [/INST] fell ", True, True),
        ("[INST] soon? [/INST]", True, False),
    ]


def test_a_system_text_before_the_only_question() -> None:
    recorder = Recorder()
    encode_dialog(recorder, [SYSTEM, USER])
    assert recorder.calls == [("[INST] <<SYS>>\nbe small\n<</SYS>>\n\n rain [/INST]", True, False)]


def test_ids_of_the_golden_tokenizer(tokenizer: Tokenizer) -> None:
    ids = encode_dialog(tokenizer, [USER, ASSISTANT, USER, ASSISTANT, LATER])
    finished = tokenizer.encode(f"{B_INST} rain {E_INST} fell ", bos=True, eos=True)
    assert ids == finished * 2 + tokenizer.encode(f"{B_INST} soon? {E_INST}", bos=True, eos=False)
    assert (ids.count(1), ids.count(2)) == (3, 2)  # BOS, EOS


def test_eos_in_a_message_never_ends_it(tokenizer: Tokenizer) -> None:
    ids = encode_dialog(tokenizer, [{"role": "user", "content": "</s>"}])
    assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == "[INST] </s> [/INST]"


def test_the_dialog_stays_as_it_was(tokenizer: Tokenizer) -> None:
    dialog: Dialog = [SYSTEM, USER, ASSISTANT, LATER]
    before, members = copy.deepcopy(dialog), list(dialog)
    encode_dialog(tokenizer, dialog)
    LLAMA2.check(dialog, 0)
    LLAMA2.is_unsafe(dialog)
    LLAMA2.truncate(tokenizer, dialog, 1)
    assert dialog == before and all(now is then for now, then in zip(dialog, members, strict=True))


WRONG: dict[str, tuple[Any, str]] = {
    "empty": ([], "dialog 3 is empty"),
    "system only": ([SYSTEM], "dialog 3 has a system message only"),
    "ends with the assistant": ([USER, ASSISTANT], "dialog 3, message 1: the last message must be from the user"),
    "begins with the assistant": ([ASSISTANT, USER], "dialog 3, message 0: role is 'assistant', expected 'user'"),
    "assistant after system": ([SYSTEM, ASSISTANT], "dialog 3, message 1: role is 'assistant', expected 'user'"),
    "two questions": ([USER, USER], "dialog 3, message 1: role is 'user', expected 'assistant'"),
    "a late system message": ([USER, SYSTEM, USER], "dialog 3, message 1: role is 'system', expected 'assistant'"),
    "two system messages": ([SYSTEM, SYSTEM, USER], "dialog 3, message 1: role is 'system', expected 'user'"),
    "an unknown role": ([USER, {"role": "bot", "content": ""}, USER], "dialog 3, message 1: role 'bot'"),
    "a role that is no text": ([{"role": ["user"], "content": ""}], r"dialog 3, message 0: role \['user'\]"),
    "no role": ([{"content": "a"}], 'dialog 3, message 0 is .*"role" and "content"'),
    "no content": ([USER, {"role": "assistant"}, USER], 'dialog 3, message 1 is .*"role" and "content"'),
    "content of None": ([{"role": "user", "content": None}], "dialog 3, message 0: content is a NoneType"),
    "content that is a list": (
        [USER, {"role": "assistant", "content": ["a"]}],
        "dialog 3, message 1: content is a list",
    ),
    "a message that is a text": (["hello"], "dialog 3, message 0 is 'hello'"),
    "a dict": (USER, "dialog 3 is a dict; it must be a list"),
    "a text": ("hello", "dialog 3 is a str; it must be a list"),
    "nothing": (None, "dialog 3 is a NoneType"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_dialog_is_named(kind: str) -> None:
    dialog, message = WRONG[kind]
    recorder = Recorder()
    with pytest.raises(LlamaError, match=f"^{message}"):
        LLAMA2.check(dialog, 3)
    with pytest.raises(LlamaError, match=f"^{message}"):
        encode_dialog(recorder, dialog, 3)
    assert recorder.calls == []


@pytest.mark.parametrize("dialog", [[USER], [SYSTEM, USER], [USER, ASSISTANT, LATER], (USER,)])
def test_right_dialogs_pass(dialog: Dialog) -> None:
    LLAMA2.check(dialog, 0)
    assert not LLAMA2.is_unsafe(dialog)


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
@pytest.mark.parametrize("place", range(4))
def test_a_special_tag_anywhere_is_unsafe(tag: str, place: int) -> None:
    dialog = copy.deepcopy([SYSTEM, USER, ASSISTANT, LATER])
    dialog[place]["content"] = f"a{tag}b"
    assert LLAMA2.is_unsafe(dialog)
    recorder = Recorder()
    with pytest.raises(LlamaError, match=f"^dialog 0: {UNSAFE_ERROR}"):
        encode_dialog(recorder, dialog)
    assert recorder.calls == []


def test_what_only_looks_like_a_tag_is_safe() -> None:
    assert not LLAMA2.is_unsafe([{"role": "user", "content": "[inst] <SYS> [ INST] <<SYS> </SYS>>"}])


def test_the_oldest_turns_go_and_the_system_text_stays(tokenizer: Tokenizer) -> None:
    dialog: Dialog = [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, LATER]
    whole = len(encode_dialog(tokenizer, dialog))
    assert LLAMA2.truncate(tokenizer, dialog, whole) == (dialog, 0)
    assert LLAMA2.truncate(tokenizer, dialog, whole - 1) == ([SYSTEM, USER, ASSISTANT, LATER], 2)
    assert LLAMA2.truncate(tokenizer, dialog, 1) == ([SYSTEM, LATER], 4)
    assert LLAMA2.truncate(tokenizer, dialog[1:], 1) == ([LATER], 4)
