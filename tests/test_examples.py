"""The two examples on the demo model, run as a user runs them; flags and defaults as published."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"
TEXT, CHAT = "example_text_completion.py", "example_chat_completion.py"
UNSAFE = "Error: special tags are not allowed as part of the prompt."

needs_demo = pytest.mark.skipif(
    not all((DEMO / name).exists() for name in ("consolidated.00.pth", "params.json", "tokenizer.model")),
    reason="checkpoints/demo is not there: make it with tools/make_demo.py",
)


def run(script: str, *flags: str, encoding: str = "utf-8", launcher: tuple[str, ...] = ()) -> str:
    """What the example prints to a terminal of this encoding; it must end well."""
    env = {name: value for name, value in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|LOCAL_|MASTER_", name)}
    env |= {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    paths = ["--ckpt_dir", str(DEMO), "--tokenizer_path", str(DEMO / "tokenizer.model")]
    argv = [sys.executable, *launcher, str(ROOT / script), *paths, "--device", "cpu", *flags]
    done = subprocess.run(argv, env=env, capture_output=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode(encoding)


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


@needs_demo
@pytest.mark.parametrize(("script", "check"), [(TEXT, assert_stories), (CHAT, assert_dialogs)])
def test_on_a_terminal_without_utf8(script: str, check: Callable[[str], None]) -> None:
    under_torchrun, plain = run(script, encoding="ascii", launcher=torchrun(1)), run(script, encoding="latin-1")
    check(under_torchrun)
    assert body(plain) == body(under_torchrun)


@needs_demo
@pytest.mark.slow
@pytest.mark.parametrize("script", [TEXT, CHAT])
def test_two_ranks_print_once_and_the_same(script: str) -> None:
    alone, shared = run(script, "--temperature", "0"), run(script, "--temperature", "0", launcher=torchrun(2))
    assert body(alone) == body(shared)


@needs_demo
def test_the_seed_and_the_length_are_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    main = load(TEXT).main

    def printed(**flags: Any) -> str:
        main(str(DEMO), str(DEMO / "tokenizer.model"), device="cpu", **flags)
        return body(capsys.readouterr().out)

    first = printed()
    assert first == printed(seed=1) != printed(seed=2)
    assert len(printed(max_gen_len=3, dtype="bfloat16")) < len(first)


@pytest.mark.parametrize(("script", "encoding"), [(TEXT, "ascii"), (CHAT, "latin-1")])
def test_a_character_the_terminal_lacks_does_not_end_it(script: str, encoding: str) -> None:
    """The demo model may never write one, so a stand-in does: it answers with U+4F60 and an emoji."""
    stub = (
        "import contextlib, runpy, sys, llama\n"
        "class Stub(contextlib.nullcontext):\n"
        "    def text_completion(self, prompts, **_):\n"
        "        return [{'generation': '\\u4f60 \\U0001f600'} for _ in prompts]\n"
        "    def chat_completion(self, dialogs, **_):\n"
        "        return [{'generation': {'role': 'assistant', 'content': '\\u4f60 \\U0001f600'}} for _ in dialogs]\n"
        "    def __enter__(self):\n"
        "        return self\n"
        "llama.Llama.build = staticmethod(lambda *_, **__: Stub())\n"
        "sys.argv = ['example', '--ckpt_dir', 'x', '--tokenizer_path', 'y']\n"
        f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
    )
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", stub], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert "? ?" in done.stdout.decode(encoding)
