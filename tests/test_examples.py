"""The two examples on the demo model; flags and defaults as published.

Each start of Python costs seconds: here one torchrun runs both examples, the rest run in this process. The commands as a
user types them are in the slow tests and in .ci/run.
"""

import importlib.util
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llama import Llama

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"
SCRIPTS = TEXT, CHAT = "example_text_completion.py", "example_chat_completion.py"
PATHS = ["--ckpt_dir", str(DEMO), "--tokenizer_path", str(DEMO / "tokenizer.model"), "--device", "cpu"]
UNSAFE = "Error: special tags are not allowed as part of the prompt."

needs_demo = pytest.mark.skipif(
    not all((DEMO / name).exists() for name in ("consolidated.00.pth", "params.json", "tokenizer.model")),
    reason="checkpoints/demo is not there: make it with tools/make_demo.py",
)


def run(script: Path, *flags: str, encoding: str = "utf-8", launcher: tuple[str, ...] = ()) -> str:
    """What a program of its own prints to a terminal of this encoding; it must end well."""
    env = {name: value for name, value in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|LOCAL_|MASTER_", name)}
    env |= {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, *launcher, str(script), *PATHS, *flags]
    done = subprocess.run(argv, env=env, capture_output=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode(encoding)


def run_here(monkeypatch: pytest.MonkeyPatch, script: str, encoding: str) -> str:
    """The same of an example that runs in this process."""
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "argv", [script, *PATHS])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding=encoding))
    runpy.run_path(str(ROOT / script), run_name="__main__")
    sys.stdout.flush()
    return terminal.getvalue().decode(encoding)


def body(printed: str) -> str:
    """Without the first line, the time it took to load."""
    return printed.split("\n", 1)[1]


def torchrun(ranks: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("script", "published"),
    [
        (TEXT, {"max_seq_len": 128, "max_gen_len": 64, "max_batch_size": 4}),
        (CHAT, {"max_seq_len": 512, "max_batch_size": 8, "max_gen_len": None}),
    ],
)
def test_flags_and_defaults_as_published(script: str, published: dict[str, Any]) -> None:
    parameters = list(inspect.signature(load(script).main).parameters.values())
    flags = {p.name: p.default for p in parameters}
    empty = inspect.Parameter.empty
    wanted = {"ckpt_dir": empty, "tokenizer_path": empty, "temperature": 0.6, "top_p": 0.9, **published}
    assert list(flags.items())[: len(wanted)] == list(wanted.items())
    assert dict(list(flags.items())[len(wanted) :]) == {"device": None, "dtype": None, "seed": 1}


def assert_stories(printed: str) -> None:
    assert re.match(r"Loaded in \d+\.\d\d seconds\n", printed)
    parts = re.findall(r"^(.+?) >(.*)$", printed, re.MULTILINE)
    assert len(parts) == 4 and len({prompt for prompt, _ in parts}) == 4, printed
    assert all(len(story.split()) >= 3 for _, story in parts), printed


def assert_dialogs(printed: str) -> None:
    assert re.match(r"Loaded in \d+\.\d\d seconds\n", printed)
    dialogs = printed.split("==================================")[:-1]
    answers = [dialog.partition("> Assistant: ")[2].strip() for dialog in dialogs]
    assert len(dialogs) >= 4 and all(answers), printed
    assert [answer == UNSAFE for answer in answers] == [False] * (len(answers) - 1) + [True], printed
    assert any("System: " in dialog for dialog in dialogs), "no dialog shows a system prompt"
    assert any(dialog.count("User: ") == 2 for dialog in dialogs), "no dialog has several turns"


BOTH = f"""
import runpy, sys
for script in {[str(ROOT / script) for script in SCRIPTS]}:
    sys.stdout.reconfigure(errors="strict")
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
    print("\\f", end="")
"""


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example prints to an ASCII terminal."""
    program = tmp_path_factory.mktemp("examples") / "both.py"
    program.write_text(BOTH)
    text, chat, rest = run(program, encoding="ascii", launcher=torchrun(1)).split("\f")
    assert rest == ""
    return {TEXT: text, CHAT: chat}


@needs_demo
@pytest.mark.parametrize(("script", "check"), [(TEXT, assert_stories), (CHAT, assert_dialogs)])
def test_on_a_terminal_without_utf8(
    under_torchrun: dict[str, str], monkeypatch: pytest.MonkeyPatch, script: str, check: Callable[[str], None]
) -> None:
    check(under_torchrun[script])
    assert body(run_here(monkeypatch, script, "latin-1")) == body(under_torchrun[script])


@needs_demo
@pytest.mark.slow
@pytest.mark.parametrize("script", [TEXT, CHAT])
def test_two_ranks_print_once_and_the_same(script: str) -> None:
    alone = run(ROOT / script, "--temperature", "0")
    shared = run(ROOT / script, "--temperature", "0", launcher=torchrun(2))
    assert body(alone) == body(shared)


@needs_demo
def test_the_seed_and_the_length_are_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    main = load(TEXT).main

    def printed(**flags: Any) -> str:
        main(str(DEMO), str(DEMO / "tokenizer.model"), device="cpu", **{"max_gen_len": 16, **flags})
        return body(capsys.readouterr().out)

    first = printed()
    assert first == printed(seed=1) != printed(seed=2)
    assert len(printed(max_gen_len=3, dtype="bfloat16")) < len(first)


class Stub(nullcontext[Any]):
    """Answers with U+4F60 and an emoji, which the demo model may never write."""

    answer = "\u4f60 \U0001f600"
    model = None

    def __enter__(self) -> "Stub":
        return self

    def text_completion(self, prompts: list[str], **_: Any) -> Any:
        return [{"generation": self.answer} for _ in prompts]

    def chat_completion(self, dialogs: list[Any], **_: Any) -> Any:
        return [{"generation": {"role": "assistant", "content": self.answer}} for _ in dialogs]


@pytest.mark.parametrize(("script", "encoding"), [(TEXT, "ascii"), (CHAT, "latin-1")])
def test_a_character_the_terminal_lacks_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, script: str, encoding: str
) -> None:
    monkeypatch.setattr(Llama, "build", staticmethod(lambda *_, **__: Stub()))
    assert "? ?" in run_here(monkeypatch, script, encoding)
