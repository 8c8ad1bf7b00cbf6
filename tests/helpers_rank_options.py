"""Run on every rank by tests/test_rank_options.py: `helpers_rank_options.py FOLDER`; what each rank saw goes to FOLDER."""

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import GOLDEN, build_golden

from llama import Llama, LlamaError
from llama.serving import serve
from llama.serving.conversation import Conversation

RANK = int(os.environ.get("RANK", "0"))
PROMPTS = torch.load(GOLDEN / "golden.pt", weights_only=True)["prompts"]
DIALOG: Any = [{"role": "user", "content": "bird?"}]
QUESTION = "What comes after October?"


def greedy(generator: Llama) -> Any:
    return generator.generate(PROMPTS, 12, temperature=0)[0]


def closed_early(generator: Llama) -> Any:
    """Streams of every kind, closed after one step; the tokens of a call right after each, and who was busy."""
    talk = Conversation(generator)
    streams: list[Callable[[], Any]] = [
        lambda: generator.stream(PROMPTS, 12),
        lambda: generator.stream_text("river stone", temperature=0),
        lambda: generator.stream_chat(DIALOG, temperature=0),
        lambda: talk.ask("bird?", temperature=0),
    ]
    tokens = []
    for start in streams:
        stream = start()
        next(stream)
        try:
            greedy(generator)
        except LlamaError as error:
            assert "busy" in str(error)
        else:
            raise AssertionError("an open stream let another call in")
        stream.close()
        tokens.append(greedy(generator))
    return {"tokens": tokens, "talk": talk.dialog}


def served(generator: Llama) -> Any:
    """Three requests, the second one a mistake. What the first rank was answered, and how often each was called."""
    answers: list[Any] = []
    calls: list[int] = []
    original = generator.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(RANK)
        return original(*args, **kwargs)

    generator.generate = counted  # type: ignore[method-assign]

    def run_server(call: Callable[..., Any]) -> None:
        answers.append(call("generate", PROMPTS, 12, temperature=0)[0])
        for name, wrong in (("generate", [[1, 5000]]), ("train", [[1]])):
            try:
                call(name, wrong, 4)
            except LlamaError as error:
                answers.append(str(error))
        answers.append(call("chat_completion", [DIALOG], 0, max_gen_len=6))

    serve(generator, run_server)
    del generator.generate  # type: ignore[method-assign]
    return {"answers": answers, "calls": len(calls), "alone": generator.chat_completion([DIALOG], 0, max_gen_len=6)}


def command(folder: Path, *argv: str, piped: str) -> None:
    """`python -m llama ARGV` with `piped` on the first rank's standard input; a mark of that rank's behind its output."""
    if RANK == 0:
        path = folder / f"stdin of {argv[0]}"
        path.write_text(piped, encoding="utf-8")
        os.dup2(os.open(path, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = ["llama", *argv]
    runpy.run_module("llama", run_name="__main__", alter_sys=True)
    if RANK == 0:
        print("\f", end="", flush=True)


def main(folder: Path) -> None:
    with build_golden(timeout=30) as generator:
        found = {"closed_early": closed_early(generator), "served": served(generator)}
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    if RANK == 0:
        print("\f", end="", flush=True)
    system = "Be brief, and kind."
    lines = [QUESTION, f"/save {folder / 'dialog.json'}", "/reset", f"/load {folder / 'dialog.json'}", "/load nowhere"]
    lines += ["[INST] hello", f"/system {system}", QUESTION]
    command(folder, "chat", "--temperature", "0", piped="\n".join(lines))
    command(folder, "complete", "--temperature", "0", "--max_gen_len", "16", piped="One day, Mia\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
