"""Nothing that a model, a file or a name holds is obeyed by the terminal; what is loaded is a file, and small."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from helpers import build_golden

from llama import __main__ as program
from llama.cli import chat as chatting
from llama.cli import complete as completing
from llama.cli.info import info
from llama.cli.output import printable
from llama.serving.conversation import Conversation

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e\x7f"


def tame(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\x9b\r\x08\u202e\x7f")


def test_controls_are_shown_and_texts_are_left_alone() -> None:
    assert printable(EVIL) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e\x7f"
    text = "a\tb\nc é 日本 👩‍🚀 שלום \\x1b"
    assert printable(text) == text
    assert "".join(map(printable, EVIL)) == printable(EVIL)
    assert all(tame(printable(chr(code))) for code in range(0x3000))


class Speaker:
    """A generator whose model says evil things."""

    def stream_text(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        yield from EVIL + "said"


def test_what_a_model_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(completing, "open_model", lambda *a, **k: contextlib.nullcontext(Speaker()))
    completing.complete(EVIL + "asked")
    with build_golden() as generator:
        conversation = Conversation(generator)
        chatting._print_answer(conversation, (character for character in EVIL + "answered"), False)
    out = capsys.readouterr().out
    assert tame(out) and all(word in out for word in ("asked", "said", "answered"))


def test_what_is_typed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"/{EVIL}unknown", f"/load {tmp_path}/{EVIL}nowhere", f"/save {tmp_path}/{EVIL}talk", f"/load {tmp_path}"]
    monkeypatch.setattr(chatting, "_lines", lambda: iter(lines))
    chatting.chat(device="cpu")
    out = capsys.readouterr().out
    assert tame(out) and out.count("\n") == 4
    assert all(word in out for word in ("unknown", "nowhere", "(saved 0 messages", "directory"))


def test_names_and_paths_in_files_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {**files.weights(dtype=torch.bfloat16), f"{EVIL}weight": torch.ones(2)}
    folder = tmp_path / EVIL.replace("/", "")
    files.write_meta(folder, files.weights(dtype=torch.bfloat16))
    info(str(folder))
    assert tame(capsys.readouterr().out)
    torch.save(weights, folder / "consolidated.00.pth")
    monkeypatch.setattr(sys, "argv", ["llama", "info", str(folder)])
    with pytest.raises(SystemExit):
        program.main()
    said = "".join(capsys.readouterr())
    assert tame(said) and "1 weights that a Llama model does not have" in said
    for argv in (["info", f"{tmp_path}/{EVIL}nowhere"], [f"--{EVIL}"], ["info", "x", f"--{EVIL}=1"], [f"{EVIL}"]):
        monkeypatch.setattr(sys, "argv", ["llama", *argv])
        with pytest.raises(SystemExit) as ended:
            program.main()
        assert ended.value.code in (1, 2) and tame("".join(capsys.readouterr()))


def test_warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("llama")
    before = list(logger.filters)
    monkeypatch.setattr(sys, "argv", ["llama", "info", "/nowhere"])
    with pytest.raises(SystemExit):
        program.main()
    try:
        logger.warning("%s: not used", EVIL)
        assert tame(caplog.messages[-1]) and "not used" in caplog.messages[-1]
    finally:
        logger.filters[:] = before


def test_only_small_regular_files_are_loaded(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (chatting._LARGEST + 1))
    (tmp_path / "talk").write_text('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]')
    with build_golden() as generator:
        conversation = Conversation(generator)
        for name, why in (
            (f"{tmp_path}/pipe", "not a regular file"),
            ("/dev/zero", "not a regular file"),
            (f"{tmp_path}/large", "larger than"),
        ):
            said = chatting._run_command(conversation, f"/load {name}")
            assert said.startswith("(cannot load") and why in said
        assert "loaded 2" in chatting._run_command(conversation, f"/load {tmp_path}/talk")
