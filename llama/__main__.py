"""python -m llama {complete, chat, convert, info}; `--help` behind each of them says what it takes."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fire  # type: ignore[import-untyped]

from . import parallel
from .conversation import Conversation
from .convert import convert, info
from .errors import LlamaError
from .generation import Llama

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"

_COMMANDS = """/reset forgets the turns, /system TEXT sets the system text, /save FILE and /load FILE keep and fetch the
dialog, Ctrl-C stops an answer, Ctrl-D ends"""


def _build(ckpt: str | None, tokenizer: str | None, max_seq_len: int, device: str | None, dtype: str | None) -> Llama:
    """The model that was asked for, or the one that ships."""
    if ckpt is None and not DEMO.exists():
        raise LlamaError(f"the demo model is not at {DEMO} (it ships with the repository): pass --ckpt")
    return Llama.build(ckpt or str(DEMO), tokenizer, max_seq_len, 1, device=device, dtype=dtype)


def complete(
    prompt: str | None = None,
    ckpt: str | None = None,
    tokenizer: str | None = None,
    max_seq_len: int = 256,
    max_gen_len: int | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    seed: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Continue PROMPT (or what is piped in), printing the text as it comes; without --ckpt, with the demo model."""
    with _build(ckpt, tokenizer, max_seq_len, device, dtype) as generator:
        text = parallel.broadcast_object(prompt if prompt is not None else _piped("Once upon a time"))
        print(text, end="", flush=True)
        for piece in generator.stream_text(str(text), temperature, top_p, max_gen_len, seed=seed, keep_space=True):
            print(piece, end="", flush=True)
        print()


def _piped(default: str) -> str | None:
    """What stands on the first rank's standard input, where that is no terminal; else `default`."""
    if parallel.rank() > 0:
        return None
    return (sys.stdin.read().rstrip("\n") or default) if not sys.stdin.isatty() else default


def chat(
    ckpt: str | None = None,
    tokenizer: str | None = None,
    system: str | None = None,
    max_seq_len: int = 512,
    max_gen_len: int | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    seed: int | None = None,
    speed: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Talk with a chat model; without --ckpt, with the one that ships.

    /reset forgets the turns, /system TEXT sets the system text, /save FILE and /load FILE keep and fetch the dialog,
    Ctrl-C stops an answer and keeps the chat, Ctrl-D ends. --speed prints tokens per second after each answer.
    """
    with _build(ckpt, tokenizer, max_seq_len, device, dtype) as generator:
        talk = Conversation(generator, system)
        print(f"({_COMMANDS})")
        for line in _lines():
            try:
                if line.startswith("/"):
                    print(_command(talk, line))
                elif line.strip():
                    _answer(talk, line, speed, temperature, top_p, max_gen_len, seed)
            except (LlamaError, OSError) as error:
                print(f"({error})")


def _lines() -> Iterator[str]:
    """What the user types on the first rank, on every rank, until Ctrl-D."""
    while True:
        line: str | None = None
        if parallel.rank() == 0:
            try:
                line = input("> ")
            except EOFError:
                print()
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends)")
                line = ""
        line = parallel.broadcast_object(line)
        if line is None:
            return
        yield line


def _answer(
    talk: Conversation, line: str, speed: bool, temperature: float, top_p: float, limit: int | None, seed: int | None
) -> None:
    begin = time.perf_counter()
    pieces = talk.ask(line, temperature, top_p, limit, seed=seed)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    finally:
        pieces.close()  # type: ignore[attr-defined]
    print()
    if talk.dropped:
        print(f"({talk.dropped} old messages no longer fit in the window and were dropped)")
    if speed and talk.completion_tokens:
        took = time.perf_counter() - begin
        print(f"({talk.completion_tokens} tokens, {talk.completion_tokens / took:.1f} a second)")


def _command(talk: Conversation, line: str) -> str:
    """Carry out one /command; returns what to say about it."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/reset":
        talk.reset()
        return "(forgotten)"
    if name == "/system":
        talk.system = rest
        return "(system text set)" if rest else "(no system text)"
    if name == "/save" and rest:
        if parallel.rank() == 0:
            Path(rest).write_text(json.dumps(talk.messages(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return f"(saved {len(talk.dialog)} messages to {rest})"
    if name == "/load" and rest:
        talk.load(_read_dialog(rest))
        return f"(loaded {len(talk.dialog)} messages from {rest})"
    return f"({name} is no command, or lacks its text: {_COMMANDS})"


def _read_dialog(path: str) -> object:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise LlamaError(f"{path} holds no dialog that /save wrote: {error}") from error


def main() -> None:
    """The command line; a mistake is one line on stderr and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that knows no UTF-8
    try:
        fire.Fire({"complete": complete, "chat": chat, "convert": convert, "info": info}, name="python -m llama")
    except (LlamaError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
