"""Which chat format a checkpoint gets, where its template is read from, and every way to chat with each format."""

import base64
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GOLDEN, StubModel, StubTokenizer, build_golden

from llama import Llama, LlamaError
from llama.chat import LLAMA2, ChatMLFormat, Llama3Format, TemplateFormat, family_format
from llama.checkpoint import choose_format, find_chat_template, open_checkpoint, templates
from llama.serving import Conversation, serve
from llama.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + 'ask ' + m.content }}{% elif m.role == 'system' %}"
    "{{ '(' + m.content + ') ' }}{% else %}{{ ' say ' + m.content + eos_token }}{% endif %}{% endfor %} say"
)
LLAMA3 = GOLDEN.parent / "llama3"
ASK: Any = [{"role": "user", "content": "river stone"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The golden checkpoint, to lay things beside."""
    for path in GOLDEN.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.fixture
def generator(folder: Path) -> Any:
    pytest.importorskip("jinja2")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with build_golden(ckpt_dir=str(folder)) as made:
        yield made


def test_metas_folder_is_answered_as_published_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "llama"), build_golden() as generator:
        assert generator.chat_format is LLAMA2
        [answer] = generator.chat_completion([[{"role": "user", "content": "a [INST] b"}]])
    assert answer["generation"]["content"].startswith("Error: special tags") and not caplog.records


def test_another_folder_without_a_template_gets_llama_2s_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(str(GOLDEN / "tokenizer.model"))
    checkpoint = dataclasses.replace(open_checkpoint(GOLDEN), format="hf")
    with caplog.at_level(logging.WARNING, "llama"):
        chosen = choose_format(None, checkpoint, tokenizer)
        assert not caplog.records  # who completes texts need not know
        for _ in range(2):
            assert chosen.encode(tokenizer, ASK) == LLAMA2.encode(tokenizer, ASK)
    [record] = caplog.records
    assert "has no chat template: dialogs are written in Llama 2's format" in record.message
    caplog.clear()
    assert choose_format("llama2", checkpoint, tokenizer) is LLAMA2 and not caplog.records


def test_the_checkpoints_own_template_and_what_wins_over_it(generator: Llama, folder: Path) -> None:
    tokenizer = generator.tokenizer
    assert isinstance(generator.chat_format, TemplateFormat)
    assert generator.chat_format.stop_ids == {tokenizer.eos_id}
    ids = generator.chat_format.encode(tokenizer, ASK)
    assert ids[0] == tokenizer.bos_id and tokenizer.decode(ids) == "ask river stone say"
    settings: dict[str, Any] = {"ckpt_dir": str(folder)}
    with build_golden(**settings, chat_format="llama2") as other:
        assert other.chat_format is LLAMA2
    own = TemplateFormat("x", tokenizer)
    with build_golden(**settings, chat_format=own) as other:
        assert other.chat_format is own
    with build_golden(**settings, chat_format="template") as other:
        assert other.chat_format.encode(tokenizer, ASK) == ids


class Headers(StubTokenizer):
    special_ids = {"<|begin_of_text|>": 90, "<|start_header_id|>": 91, "<|end_header_id|>": 92, "<|eot_id|>": 93}
    special_ids |= {"<|eom_id|>": 94}


class Marks(StubTokenizer):
    special_ids = {"<|im_start|>": 91, "<|im_end|>": 92}

    def encode(self, s: str, bos: bool, eos: bool, specials: bool = False) -> list[int]:
        for name, token in self.special_ids.items():
            s = s.replace(name, chr(token + 1000)) if specials else s
        return [ord(letter) - 1000 if ord(letter) > 1000 else ord(letter) % 90 for letter in s]


def test_the_vocabulary_tells_the_family() -> None:
    assert isinstance(family_format(Headers()), Llama3Format) and isinstance(family_format(Marks()), ChatMLFormat)
    assert family_format(StubTokenizer()) is LLAMA2
    llama = Llama(StubModel(), Headers())
    assert isinstance(llama.chat_format, Llama3Format) and llama.chat_format.stop_ids == {93, 94}
    assert Llama(StubModel(), Headers(), chat_format="llama2").chat_format is LLAMA2


def test_llama_3s_ids_one_by_one() -> None:
    def text(s: str) -> list[int]:
        return [ord(letter) % 95 for letter in s]

    dialog: Any = [{"role": "user", "content": " a "}, {"role": "tool", "content": "<|eot_id|>"}]
    wanted = [90, 91, *text("user"), 92, *text("\n\n"), *text("a"), 93]
    wanted += [
        91,
        *text("ipython"),
        92,
        *text("\n\n"),
        *text("<|eot_id|>"),
        93,
        91,
        *text("assistant"),
        92,
        *text("\n\n"),
    ]
    tokenizer = Headers()
    assert Llama3Format(tokenizer).encode(tokenizer, dialog) == wanted


def test_chatmls_ids_one_by_one() -> None:
    def text(s: str) -> list[int]:
        return [ord(letter) % 90 for letter in s]

    dialog: Any = [{"role": "user", "content": " a "}]
    wanted = [91, *text("user\n a "), 92, *text("\n"), 91, *text("assistant\n")]
    assert ChatMLFormat(Marks()).encode(Marks(), dialog) == wanted


def test_a_tokenizer_that_makes_control_tokens_of_any_text_is_found_out() -> None:
    class Careless(Headers):
        def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
            return [93] if s == "<|eot_id|>" else super().encode(s, bos, eos)

    with pytest.raises(LlamaError, match="makes control tokens of the text '<|eot_id|>'"):
        Llama3Format(Careless()).encode(Careless(), [{"role": "user", "content": "<|eot_id|>"}])


@pytest.mark.parametrize("name", ["llama3", "chatml"])
def test_errors_name_dialog_and_message(name: str) -> None:
    chosen: Any = Llama3Format(Headers()) if name == "llama3" else ChatMLFormat(Marks())
    for dialog, complaint in (
        ([], "dialog 3 is empty"),
        ("hello", "dialog 3 is a str; it must be a list"),
        (
            [*ASK, {"role": "bot", "content": ""}],
            "dialog 3, message 1: role 'bot' is not 'system', 'user', 'assistant'",
        ),
        ([*ASK, {"role": "tool|>", "content": ""}], r"dialog 3, message 1: role 'tool\|>' is not"),
        ([*ASK, {"role": "user", "content": None}], "dialog 3, message 1: content is a NoneType"),
    ):
        with pytest.raises(LlamaError, match=complaint):
            chosen.check(dialog, 3)


WRONG: dict[str, tuple[Any, str]] = {
    "a wrong name": ("lama2", "chat_format='lama2' must be one of llama2, llama3, chatml, template"),
    "no template": ("template", "the checkpoint has no chat template"),
    "no headers": ("llama3", r"llama3 needs <\|begin_of_text\|>, .* which the vocabulary lacks"),
    "no marks": ("chatml", r"chatml needs <\|im_start\|>, <\|im_end\|>, which the vocabulary lacks"),
    "no format": (7, "chat_format=7 must be one of llama2, .* or an object with the methods of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said(name: str) -> None:
    given, complaint = WRONG[name]
    with pytest.raises(LlamaError, match=complaint):
        build_golden(chat_format=given)


# ------------------------------------------------------------------------------------------ files


def put(folder: Path, settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_where_a_template_is_found(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert find_chat_template(checkpoint) is None
    put(folder, {"chat_template": None})
    assert find_chat_template(checkpoint) is None
    put(folder, {"chat_template": "one"})
    assert find_chat_template(checkpoint) == "one"
    put(folder, {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})
    assert find_chat_template(checkpoint) == "d"
    (folder / "chat_template.jinja").write_text("file ä")
    assert find_chat_template(checkpoint) == "file ä"
    checkpoint.chat_template = "own"  # type: ignore[attr-defined,unused-ignore]
    assert find_chat_template(checkpoint) == "own"


def test_templates_of_which_none_is_the_default(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(folder, {"chat_template": [{"name": "rag", "template": "t"}, 7]})
    with caplog.at_level(logging.WARNING, "llama"):
        assert find_chat_template(open_checkpoint(folder)) is None
    assert 'none of them named "default"' in caplog.text


def test_files_that_hold_no_template(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for settings in ({"chat_template": 7}, {"chat_template": [{"name": "default", "template": ["x"]}]}, ["x"]):
        put(folder, settings)
        with pytest.raises(LlamaError, match=r"tokenizer_config\.json: a"):
            find_chat_template(checkpoint)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(LlamaError, match="no valid JSON"):
        find_chat_template(checkpoint)
    for data in (b"\xff\xfe\xfd", b"x" * (templates.LARGEST + 1), b"", b"version https://git-lfs.github.com/spec/v1"):
        (folder / "chat_template.jinja").write_bytes(data)
        with pytest.raises(LlamaError, match=r"chat_template\.jinja") as caught:
            find_chat_template(checkpoint)
        assert len(str(caught.value)) < 1100


def test_tokens_are_those_of_the_settings(generator: Llama, folder: Path) -> None:
    put(folder, {"bos_token": {"content": "<begin>", "special": True}, "eos_token": None, "pad_token": 7})
    tokenizer = generator.tokenizer
    found = choose_format(None, open_checkpoint(folder), tokenizer)
    text = tokenizer.decode(found.encode(tokenizer, ASK))
    assert text == "<begin>ask river stone say"


def test_a_broken_template_hinders_no_text(folder: Path) -> None:
    pytest.importorskip("jinja2")
    (folder / "chat_template.jinja").write_text("{% for")
    with build_golden(ckpt_dir=str(folder)) as generator:
        generator.text_completion(["river"], max_gen_len=2)
        with pytest.raises(LlamaError, match="dialog 0: the checkpoint's chat template cannot be used: Template"):
            generator.chat_completion([ASK])
    with pytest.raises(LlamaError, match="the checkpoint's chat template cannot be used"):
        build_golden(ckpt_dir=str(folder), chat_format="template")


def test_info_names_the_format(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert templates.describe_format(checkpoint) == "llama2"
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert templates.describe_format(checkpoint) == f"its own template ({len(TEMPLATE)} characters)"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert templates.describe_format(checkpoint).startswith("not known: ")


# ------------------------------------------------------------------------------------------ every way to chat


def test_completion_stream_and_conversation_say_the_same(generator: Llama) -> None:
    dialog: Any = [{"role": "system", "content": "be small"}, *ASK, {"role": "assistant", "content": "yes"}, *ASK]
    settings: dict[str, Any] = {"temperature": 0, "max_gen_len": 8}
    ids = generator.chat_format.encode(generator.tokenizer, dialog)
    wanted = generator.tokenizer.decode(generator.generate([ids], 8, temperature=0)[0][0])
    [answer] = generator.chat_completion([dialog], **settings)
    assert answer["generation"] == {"role": "assistant", "content": wanted}
    assert "".join(generator.stream_chat(dialog, **settings)) == wanted
    conversation = Conversation(generator, "be small")
    conversation.load(dialog[:-1])
    assert "".join(conversation.ask("river stone", **settings)) == wanted
    assert conversation.messages()[:-1] == dialog and conversation.kept

    answers: list[Any] = []
    serve(generator, lambda call: answers.extend(call("chat_completion", [dialog], **settings)))
    assert answers == [answer]


def test_the_oldest_turns_are_dropped(generator: Llama) -> None:
    talk: Any = [*ASK, {"role": "assistant", "content": "stone " * 4}] * 4 + ASK
    with pytest.raises(LlamaError, match="max_seq_len"):
        generator.chat_completion([talk])
    [answer] = generator.chat_completion([talk], drop_oldest=True, details=True, max_gen_len=4)
    assert answer["dropped"] > 0 and answer["dropped"] % 2 == 0
    conversation = Conversation(generator)
    conversation.load(talk[:-1])
    list(conversation.ask("river stone", max_gen_len=4))
    assert conversation.dropped == answer["dropped"]


def test_tags_of_another_format_are_plain_text(generator: Llama) -> None:
    conversation = Conversation(generator, "[INST] is a word")
    answer = "".join(conversation.ask("a [INST] b", max_gen_len=3))
    assert "special tags" not in answer and conversation.kept


def test_stop_ids_of_tokenizer_and_format_together(generator: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    [ids] = generator.generate([[1, 20, 30]], 8, temperature=0)[0]
    monkeypatch.setattr(generator.chat_format, "stop_ids", frozenset([ids[3]]))
    assert generator.generate([[1, 20, 30]], 8, temperature=0)[0] == [ids[: ids.index(ids[3])]]


def test_the_command_line_names_a_format(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llama.__main__ import main

    def chat(*options: str, lines: tuple[str, ...] = ("a [INST] b",)) -> str:
        given = iter(lines)
        read: Callable[..., str] = lambda prompt="": next(given, None) or (_ for _ in ()).throw(EOFError())  # noqa: E731
        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("sys.argv", ["llama", "chat", "--ckpt", str(folder), "--max_seq_len", "48", *options])
        main()
        return capsys.readouterr().out

    pytest.importorskip("jinja2")
    assert "Error: special tags" in chat()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert "Error: special tags" not in chat("--temperature", "0")
    assert chat("--temperature", "0", "--chat_format", "template") == chat("--temperature", "0")
    assert "Error: special tags" in chat("--chat_format", "llama2")
    with pytest.raises(SystemExit):
        chat("--chat_format", "chatml")
    assert "chatml needs <|im_start|>" in capsys.readouterr().err


def test_llama_3_answers_as_metas_package(tmp_path: Path) -> None:
    """The ids of its prompts, and its answers to the end of their turns."""
    pytest.importorskip("tiktoken")
    golden = torch.load(LLAMA3 / "golden.pt", weights_only=True)
    path = tmp_path / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(bytes([rank])).decode()} {rank}\n" for rank in range(256)))
    with build_golden(ckpt_dir=str(LLAMA3), tokenizer_path=str(path), max_seq_len=96) as generator:
        chosen = generator.chat_format
        assert isinstance(chosen, Llama3Format) and chosen.stop_ids | generator.tokenizer.stop_ids == {257, 264, 265}
        assert [chosen.encode(generator.tokenizer, dialog) for dialog in golden["dialogs"]] == golden["dialog_ids"]
        assert generator.chat_completion(golden["dialogs"], temperature=0, max_gen_len=20) == golden["chat"]
