"""The command line: `complete` and `chat` with pipes, at a terminal, with commands, bad files and foreign encodings."""

import contextlib
import fcntl
import inspect
import io
import json
import os
import pty
import re
import runpy
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import GOLDEN, ROOT, build_golden

from llama import Llama, LlamaError, Tokenizer, encode_dialog
from llama.__main__ import COMMANDS, main
from llama.chat import LLAMA2, UNSAFE_ERROR, Dialog
from llama.cli.arguments import parse_arguments
from llama.serving.conversation import Conversation

QUESTION, ANSWER = "What comes after October?", "After October comes November."
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `python -m llama ARGV` in this process; what it prints, decoded."""

    def start(*argv: str, piped: str | bytes = "", encoding: str = "utf-8") -> str:
        data = piped.encode() if isinstance(piped, str) else piped
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
        monkeypatch.setattr(sys, "argv", ["llama", *argv])
        runpy.run_module("llama", run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        return printed.getvalue().decode(encoding)

    return start


def environment(**changes: str) -> dict[str, str]:
    plain = {
        name: value for name, value in os.environ.items() if not re.match(r"LC_|LANG|PYTHON(IO|UTF8|COERCE)", name)
    }
    return {**plain, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


# ---------------------------------------------------------------------------------------- pipes


def test_complete_prints_prompt_and_text_and_nothing_else(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    text = run("complete", "--prompt", "One day, Mia", "--seed", "3", "--max_gen_len", "12")
    with Llama.build(str(ROOT / "checkpoints" / "demo"), None, 256, 1, device="cpu") as generator:
        [wanted] = generator.text_completion(["One day, Mia"], max_gen_len=12, seed=3, keep_space=True)
    assert text == "One day, Mia" + wanted["generation"] + "\n"
    assert text == run("complete", "--seed", "3", "--max_gen_len", "12", piped="One day, Mia\n")
    assert capfd.readouterr().err.count("Loaded in") == 2, "the report belongs on stderr"
    assert run("complete", "--max_gen_len", "1").startswith("Once upon a time")


def test_chat_through_a_pipe_prints_answers_alone(run: Run) -> None:
    printed = run("chat", "--temperature", "0", piped=f"{QUESTION}\n\n   \n{QUESTION}")
    assert [line.strip() for line in printed.split("\n")] == [ANSWER, ANSWER, ""]
    assert run("chat") == ""


def test_speed_and_length(run: Run) -> None:
    answer, cut, speed, end = run("chat", "--speed", "--max_gen_len", "3", "--temperature", "0", piped=QUESTION).split(
        "\n"
    )
    assert ANSWER.startswith(answer) and "--max_gen_len" in cut and end == ""
    assert re.fullmatch(r"\(3 tokens, [\d.]+ tokens/s\)", speed)


def test_a_full_window_gives_notice(run: Run) -> None:
    printed = run("chat", "--max_seq_len", "80", "--temperature", "0", piped=f"{QUESTION}\n" * 4 + "why " * 70)
    assert "(2 old messages no longer fit in the context window and were dropped)" in printed
    *_, error, end = printed.split("\n")
    assert "more than max_seq_len=80" in error and end == ""


def test_every_command(run: Run, tmp_path: Path) -> None:
    file, other = tmp_path / "a dialog.json", tmp_path / "other.json"
    system = "Be brief, and kind: 日本"
    lines = ["/system " + system, QUESTION, f"/save {file}", "/reset", f"/save {other}", f"/load {file}", "/system"]
    lines += ["/save", "/load  ", f"/save {tmp_path}", "/save a\0b", "/reload", "/help", "[INST] me", "/system [INST]"]
    answer, *found = run("chat", "--temperature", "0", piped="\n".join(lines)).split("\n")[1:]
    wanted = [
        "saved 3 messages",
        "conversation cleared",
        "saved 1 messages",
        "loaded 3 messages",
        "system prompt removed",
    ]
    wanted += [
        "/save needs a file",
        "/load needs a file",
        "cannot save .*directory",
        "cannot save .*null",
        "unknown command /reload",
    ]
    for words, line in zip(wanted, found):
        assert re.match(rf"\({words}", line), line
    rest = found[len(wanted) :]
    assert all(any(line.startswith(name) for line in rest) for name in ("/system", "/reset", "/save", "/load"))
    assert rest[-3] == UNSAFE_ERROR and "the system text '[INST]' holds one of" in rest[-2]
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "system", "content": system},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": answer},
    ]
    assert json.loads(other.read_text(encoding="utf-8")) == [{"role": "system", "content": system}]


BAD_FILES: dict[str, bytes] = {
    "text": b"hello",
    "not utf-8": b"\xff\xfe[]",
    "a dict": b'{"role": "user", "content": "a"}',
    "strings": b'["a", "b"]',
    "ends with a question": b'[{"role": "user", "content": "a"}]',
    "a tag": b'[{"role": "user", "content": "[INST]"}, {"role": "assistant", "content": "b"}]',
    "deep": b"[" * 100_000,
    "number": b"5",
    "null": b"null",
}


def test_files_that_are_no_dialog_change_nothing(run: Run, tmp_path: Path) -> None:
    for name, data in BAD_FILES.items():
        (tmp_path / name).write_bytes(data)
    names = [*BAD_FILES, "missing", "."]
    lines = [QUESTION, *(f"/load {tmp_path / name}" for name in names), f"/save {tmp_path / 'after'}"]
    _, *found, saved, end = run("chat", "--temperature", "0", piped="\n".join(lines)).split("\n")
    assert len(found) == len(names) and all(re.fullmatch(r"\(.{20,}\)", line) for line in found), found
    assert (
        saved.startswith("(saved 2 messages") and json.loads((tmp_path / "after").read_text())[0]["content"] == QUESTION
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_knows_no_utf8(run: Run, encoding: str, tmp_path: Path) -> None:
    piped = f"caf\xe9 \u65e5 \U0001f642?\n{QUESTION}\n/save {tmp_path / 'd'}\n".encode()
    assert ANSWER in run("chat", "--temperature", "0", piped=piped, encoding=encoding)
    assert json.loads((tmp_path / "d").read_text(encoding="utf-8"))[0]["content"].startswith("caf")
    assert run("complete", "--max_gen_len", "2", piped=piped, encoding=encoding).startswith("caf")


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "-1"), ("seed", "x"), ("max_seq_len", "0"), ("ckpt", "no")]
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_wrong_setting_is_one_line(
    run: Run, command: str, name: str, value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert name in run(command, f"--{name}", value, piped="a"), "chat goes on, and names it"
        return
    error = capfd.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("error: ") and ("no" if name == "ckpt" else name) in error


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_reader_that_leaves(run: Run, command: str) -> None:
    read, write = os.pipe()
    os.close(read)

    def unread() -> None:
        with pytest.MonkeyPatch.context() as patch, open(write, "w") as stdout:
            patch.setattr(sys, "stdin", io.StringIO(QUESTION))
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "argv", ["llama", command, "--device", "cpu"])
            main()

    with pytest.raises(SystemExit) as ended:
        unread()
    assert ended.value.code == 141


# ------------------------------------------------------------------------------- help and arguments


def parse(*argv: str) -> dict[str, Any]:
    """The arguments that `python -m llama ARGV` gives to its command."""
    return parse_arguments(COMMANDS, argv)[1]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is said to arguments that are wrong: one line on stderr, nothing on stdout, and exit code 2."""

    def refused(*argv: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parse(*argv)
        printed, said = capsys.readouterr()
        assert ended.value.code == 2 and printed == "" and said.startswith("error: ") and said.count("\n") == 1
        return said

    return refused


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option_and_loads_nothing(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("--help opened a model")

    monkeypatch.setattr(Llama, "build", never)
    monkeypatch.setenv("COLUMNS", "120")
    texts = []
    for argv in ([name, "--help"], [name, "-h"], [name, "a b", "--help"], [name, "--sed", "1", "-h"]):
        with pytest.raises(SystemExit) as ended:
            parse(*argv)
        assert ended.value.code == 0
        text, error = capfd.readouterr()
        assert error == "" and "INFO" not in text
        texts.append(text)
    assert texts == texts[:1] * 4
    assert "Args:" not in text and "SUPPRESS" not in text and "-no" not in text
    for parameter in inspect.signature(COMMANDS[name]).parameters.values():
        option = parameter.name.upper() if parameter.default is parameter.empty else f"--{parameter.name}"
        assert re.search(rf"^  {option}\b.*(\n {{10,}}|  )\S.*", text, re.MULTILINE), option
        if type(parameter.default) in (int, float, str):
            assert f"Default: {parameter.default}." in " ".join(text.split())
    assert (inspect.getdoc(COMMANDS[name]) or "").partition("\n\nArgs:")[0] in text


def test_help_and_version_of_the_whole(capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for argv in ([], ["-h"], ["--help"], ["--help", "chat"]):
        with pytest.raises(SystemExit) as ended:
            parse(*argv)
        assert ended.value.code == 0
        texts.append(capfd.readouterr().out)
    assert texts == texts[:1] * 4 and all(re.search(rf"^ +{name} +[A-Z]", texts[0], re.MULTILINE) for name in COMMANDS)
    with pytest.raises(SystemExit) as ended:
        parse("--version")
    assert ended.value.code == 0 and re.fullmatch(r"llama (\d+\.\d+\.\d+|\(not installed\))\n", capfd.readouterr().out)


def test_texts_reach_a_command_as_they_were_typed() -> None:
    for text in (
        "Hello, world",
        "1e5",
        "-5",
        "- a",
        "(a)",
        "None",
        "C # D",
        'it\'s "so"',
        "[1]",
        "\u65e5\n",
        "",
        "100%",
    ):
        assert parse("complete", text) == parse("complete", "--prompt", text) == {"prompt": text}
        assert parse("complete", "--seed", "1", text, "--compile") == {"seed": 1, "prompt": text, "compile": True}
        for argv in (["--system", text], [f"--system={text}"]):
            assert parse("chat", *argv) == {"system": text}
    assert parse("complete", "--prompt=--help") == {"prompt": "--help"}
    assert parse("bench", "--batches", "1,16") == {"batches": "1,16"}


def test_the_forms_of_an_option() -> None:
    assert parse("chat") == {}
    wanted = {"seed": -1, "temperature": 0.5, "max_gen_len": 7, "max_seq_len": 9, "top_p": 1.0}
    assert (
        parse("chat", *["--seed", "-1", "--temperature=.5", "--max-gen-len", "7", "--max_seq_len=9", "--top-p", "1"])
        == wanted
    )
    assert parse("complete", "--max-gen-len", "1", "--max_gen_len", "2") == {"max_gen_len": 2}
    for flag, value in (("--speed", True), ("--nospeed", False), ("--no-speed", False)):
        assert parse("chat", flag) == {"speed": value}
    assert parse("convert", "a", "--to", "meta", "b", "--shards", "2") == {
        "src": "a",
        "dst": "b",
        "to": "meta",
        "shards": 2,
    }
    assert parse("trace", "One day", "--layer", "0") == {"prompt": "One day", "layer": 0}
    assert parse("chat", "folder", "--compile", "--quantize", "int8")["ckpt"] == "folder"
    for name in ("complete", "chat", "info", "convert"):
        paths = {"info": ["a"], "convert": ["a", "b"]}.get(name, [])
        found = parse(name, *paths, "--lora", "x", "--lora=y z", "--lora_scale", "1", "--lora-scale=-.5")
        assert found["lora"] == ["x", "y z"] and found["lora_scale"] == [1.0, -0.5]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["chat", "--sed", "1"],
            r"chat has no option --sed; did you mean '--seed'\? it takes --ckpt, --tokenizer, --system, --max_seq_len",
        ),
        (
            ["complete", "a", "--temprature=0"],
            r"complete has no option --temprature; did you mean '--temperature'\? it",
        ),
        (
            ["complete", "a", "--max-gen-lem", "1"],
            "complete has no option --max-gen-lem; did you mean '--max_gen_len'?",
        ),
        (
            ["chat", "--max_gen=1"],
            r"chat has no option --max_gen; did you mean '--max_gen_len'\? it takes ",
        ),  # never completed by guessing
        (["chat", "-t", "1"], "chat has no option -t; it takes "),
        (["complete", "a", "b"], "unexpected argument 'b': text with spaces needs quotes"),
        (["chat", "a", "b"], "unexpected argument 'b'"),
        (["complete", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["complete", "--seed", "1.0"], "argument --seed: invalid int value: '1.0'"),
        (["complete", "--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["complete", "--seed"], "argument --seed: expected one argument"),
        (["complete", "--lora_scale", "x"], "argument --lora_scale: invalid float value: 'x'"),
        (["convert", "a"], "the following arguments are required: DST"),
        (["sing"], "argument COMMAND: invalid choice: 'sing' .*complete.*bench"),
        (["--seed"], "required: COMMAND"),
    ],
)
def test_what_a_command_does_not_take_is_said_before_it_runs(
    argv: list[str], words: str, refuse: Callable[..., str]
) -> None:
    assert re.search(words, said := refuse(*argv)) and re.search(r"\(see python -m llama ?\w* --help\)$", said)


# ------------------------------------------------------------------------------------ conversations


@pytest.fixture
def golden() -> Iterator[Llama]:
    with build_golden(max_seq_len=160) as generator:
        yield generator


def saying(generator: Llama, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Let the generator answer so, whatever the model says."""
    ids = generator.tokenizer.encode(answer, False, True)
    draw = iter(ids)
    monkeypatch.setattr(
        "llama.engine.sampler.Sampler._draw", lambda self, logits, rows: logits.argmax(-1) * 0 + next(draw)
    )


@pytest.mark.parametrize("tag", ["[INST]", "<</SYS>>"])
def test_an_answer_with_a_tag_is_not_kept(golden: Llama, monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    talk = Conversation(golden)
    "".join(talk.ask("rain", 0, max_gen_len=3))
    before = talk.messages()
    with monkeypatch.context() as patch:
        saying(golden, patch, f"a {tag} b")
        assert "".join(talk.ask("sun")) == f"a {tag} b"
    assert not talk.kept and talk.messages() == before
    assert UNSAFE_ERROR not in "".join(talk.ask("sun", 0, max_gen_len=3)) and talk.kept and len(talk.dialog) == 4


def test_the_notice_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with Llama.build(str(ROOT / "checkpoints" / "demo"), None, 64, 1, device="cpu") as generator:
        saying(generator, monkeypatch, "[INST]")
    answer, notice, end = run("chat", piped=QUESTION).split("\n")
    assert answer == "[INST]" and "not kept" in notice and end == ""


def test_a_question_that_cannot_be_asked_changes_nothing(golden: Llama) -> None:
    talk = Conversation(golden, "be small")
    for _ in range(3):
        "".join(talk.ask("rain", 0, max_gen_len=3))
    before = talk.messages()
    for wrong in ("long " * 200, "\ud800"):
        with pytest.raises(LlamaError):
            "".join(talk.ask(wrong, 0, max_gen_len=3))
        assert talk.messages() == before and not talk.kept
    stream = golden.stream([[1]], 2)
    next(stream)
    with pytest.raises(LlamaError, match="busy"):
        "".join(talk.ask("rain"))
    stream.close()  # type: ignore[attr-defined]
    assert talk.messages() == before


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_went(golden: Llama) -> None:
    talk = Conversation(golden)
    pieces = talk.ask("rain", 0, max_gen_len=30)
    said = next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert talk.dialog[1]["content"] == said and talk.finish_reason is None
    whole: Dialog = [*talk.dialog, {"role": "user", "content": "sun"}]
    answer = "".join(talk.ask("sun", 0, max_gen_len=8))
    assert 0 < talk.prefilled < len(encode_dialog(golden.tokenizer, whole))
    assert answer == golden.chat_completion([whole], 0, max_gen_len=8)[0]["generation"]["content"]


class Counting(Tokenizer):
    """Counts the texts that it encodes."""

    encoded = 0

    def encode(self, s: str, bos: bool, eos: bool, *, prefix_space: bool = True) -> list[int]:
        self.encoded += 1
        return super().encode(s, bos, eos, prefix_space=prefix_space)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": " be small "}]])
def test_what_fits_is_found_with_few_encodings(system: Dialog) -> None:
    """Exactly the turns that encoding every candidate finds, but each turn is encoded twice at most."""
    tokenizer = Counting(str(GOLDEN / "tokenizer.model"))
    words = [("rain", " fell"), ("  the cold night ", "was"), ("bird?", ""), ("a", "b"), ("stone", "river " * 5)]
    turns: Dialog = [*system]
    for question, answer in words:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    turns.append({"role": "user", "content": "soon?"})
    candidates = [[*system, *turns[len(system) + 2 * n :]] for n in range(6)]
    sizes = [len(encode_dialog(tokenizer, candidate)) for candidate in candidates]
    assert sizes == sorted(sizes, reverse=True)
    for room in range(sizes[0] + 2):
        wanted = next((n for n, size in enumerate(sizes) if size <= room), 5)
        tokenizer.encoded = 0
        assert LLAMA2.truncate(tokenizer, turns, room) == (candidates[wanted], 2 * wanted)
        assert tokenizer.encoded <= 6 + (5 if system else 0)


# ---------------------------------------------------------------------------------------- a terminal

SLOWLY = """
import sys, time
from llama.engine.scheduler import Scheduler
steps = Scheduler.steps
def slow(self):
    for step in steps(self):
        time.sleep(0.05)
        yield step
Scheduler.steps = slow
from llama.__main__ import main
sys.argv[0] = "llama"
main()
"""


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(self, command: list[str], **variables: str) -> None:
        self.side, other = pty.openpty()
        env = environment(TERM="dumb", **variables)
        pipes = {"stdin": other, "stdout": other, "stderr": other}
        self.process = subprocess.Popen(command, **pipes, env=env, start_new_session=True, preexec_fn=self._command)
        os.close(other)
        self.seen = ""

    @staticmethod
    def _command() -> None:
        """Make standard input the terminal that sends Ctrl-C on."""
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())

    def until(self, words: str, seconds: float = 60) -> str:
        """What appears up to `words` and with them."""
        last, place = time.monotonic() + seconds, 0
        while (place := self.seen.find(words)) < 0:
            ready, _, _ = select.select([self.side], [], [], max(0.0, last - time.monotonic()))
            assert ready, f"{words!r} did not come after {self.seen[-500:]!r}"
            self.seen += os.read(self.side, 4096).decode(errors="replace").replace("\r", "")
        found, self.seen = self.seen[: place + len(words)], self.seen[place + len(words) :]
        return found

    def ended(self) -> tuple[int, str]:
        """Exit status, and the rest of what was printed."""
        status = self.process.wait(timeout=30)
        with contextlib.suppress(OSError):  # how Linux reports the end
            while data := os.read(self.side, 4096):
                self.seen += data.decode(errors="replace").replace("\r", "")
        return status, self.seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.side)


def test_a_session_at_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", SLOWLY, "chat", "--temperature", "0", "--speed"], LC_ALL="C.UTF-8")
    try:
        assert "(/help lists the commands, Ctrl-D ends the chat)" in terminal.until("> ")
        terminal.type("Tell me a story about a cat.\n")
        terminal.until("\n")
        terminal.until(" ")  # the first word is out
        terminal.type("\x03")
        stopped = terminal.until("> ")
        assert " (stopped)\n(" in stopped and "tokens" in stopped
        for _ in range(30):  # readline overlooks one that comes before it waits for a key
            terminal.type("\x03")
            with contextlib.suppress(AssertionError):
                terminal.until("(Ctrl-D ends the chat)\n> ", seconds=1)
                break
        else:
            pytest.fail("Ctrl-C at the prompt says nothing")
        terminal.type(f"{QUESTION}\n")
        assert ANSWER in terminal.until(" tokens/s)\n> ")
        terminal.type(f"/save {tmp_path / 'dialog'}\n")
        terminal.until("(saved 4 messages")
        terminal.until("> ")
        terminal.type("\x04")
        status, rest = terminal.ended()
    finally:
        terminal.close()
    assert status == 0 and "Traceback" not in rest
    dialog = json.loads((tmp_path / "dialog").read_text())
    assert [message["role"] for message in dialog] == ["user", "assistant"] * 2 and dialog[1]["content"]


# -------------------------------------------------------------- as a user types it, one start each


@pytest.mark.slow
def test_head_leaves_no_traceback() -> None:
    for line in ("complete | head -c 5", f"chat <<< '{QUESTION}' | head -c 3", "complete <&- | head -c 0"):
        done = subprocess.run(
            ["bash", "-c", f"'{sys.executable}' -m llama {line}"], env=environment(), capture_output=True, text=True
        )
        assert len(done.stdout) == int(line[-1]) and "Traceback" not in done.stderr and "Broken" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_a_real_terminal_that_knows_no_utf8(variables: dict[str, str]) -> None:
    terminal = Terminal([sys.executable, "-m", "llama", "chat", "--temperature", "0"], **variables)
    try:
        terminal.until("> ")
        terminal.type("caf\xe9 \u65e5?\n")
        terminal.until("\n> ")
        terminal.type(f"{QUESTION}\n")
        assert ANSWER in terminal.until("\n> ")
        terminal.type("\x04")
        assert terminal.ended()[0] == 0
    finally:
        terminal.close()


def test_a_text_with_commas_and_a_flag_that_is_not_there(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("complete", "Hello, world", "--max_gen_len", "1").startswith("Hello, world")
    with pytest.raises(SystemExit):
        run("chat", "--sed", "1", piped=QUESTION)
    assert "error: chat has no option --sed" in capfd.readouterr().err
