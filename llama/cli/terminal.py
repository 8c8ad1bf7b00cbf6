"""The commands that talk: `complete` one text, `chat` turn by turn, on one rank or many."""

import contextlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from .. import distributed as parallel
from ..errors import LlamaError
from ..generation import Llama
from ..serving.conversation import Conversation

_INSTALLED = Path(__file__).resolve().parents[1] / "demo"
DEMO = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "checkpoints" / "demo"

_HELP = """/system TEXT  sets the system text, which goes before the first question; without TEXT there is none
/reset        forgets the questions and answers, not the system text
/save FILE    writes the dialog to FILE
/load FILE    goes on with the dialog in FILE
Ctrl-C stops an answer, Ctrl-D ends the chat"""


def complete(
    prompt: str | None = None,
    *,
    ckpt: str | None = None,
    tokenizer: str | None = None,
    max_seq_len: int = 256,
    max_gen_len: int | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    seed: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    compile: bool = False,
) -> None:
    """Print a text and the model's continuation of it, as it comes.

    For example: python -m llama complete "Once upon a time" --seed 3

    Args:
        prompt: The text, in quotes. Without it, what is piped in; at a terminal, "Once upon a time".
        ckpt: The checkpoint, a folder or a file; the demo model if not given.
        tokenizer: The tokenizer's file; the one beside the checkpoint if not given.
        max_seq_len: Tokens that prompt and continuation may have together.
        max_gen_len: Tokens that the continuation may have; as many as fit if not given.
        temperature: How freely the model chooses; 0 always takes the likeliest token.
        top_p: Choose among the likeliest tokens that together are this probable.
        seed: A number; the same one gives the same text again.
        device: cpu, cuda or mps; a GPU where there is one if not given.
        dtype: float32, bfloat16 or float16; what suits the device if not given.
        quantize: int8, int4 or int8-dynamic, for weights in fewer bytes.
        compile: Compile the decoding: slow to start, then faster.
    """
    build = {"device": device, "dtype": dtype, "quantize": quantize, "compile": compile}
    with _session(ckpt, tokenizer, max_seq_len, **build) as generator:
        text = parallel.broadcast_object((_piped() or "Once upon a time") if prompt is None else prompt)
        print(text, end="", flush=True)
        for piece in generator.stream_text(text, temperature, top_p, max_gen_len, seed=seed, keep_space=True):
            print(piece, end="", flush=True)
        print()


def chat(
    ckpt: str | None = None,
    *,
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
    quantize: str | None = None,
    compile: bool = False,
) -> None:
    """Talk with a chat model, line by line, at a terminal or through a pipe.

    /help lists what can be typed beside questions. Ctrl-C stops an answer and keeps the chat (under torchrun it ends
    the chat), Ctrl-D ends. When the dialog outgrows the window, its oldest turns are dropped, and the chat says so.

    Args:
        ckpt: The checkpoint of a chat model, a folder or a file; the demo model if not given.
        tokenizer: The tokenizer's file; the one beside the checkpoint if not given.
        system: The system text, which tells the model how to answer.
        max_seq_len: The window: tokens that the dialog and the next answer may have together.
        max_gen_len: Tokens that an answer may have; as many as fit if not given.
        temperature: How freely the model chooses; 0 always takes the likeliest token.
        top_p: Choose among the likeliest tokens that together are this probable.
        seed: A number; the same one gives the same answers to the same questions again.
        speed: Say after each answer how many tokens a second it took.
        device: cpu, cuda or mps; a GPU where there is one if not given.
        dtype: float32, bfloat16 or float16; what suits the device if not given.
        quantize: int8, int4 or int8-dynamic, for weights in fewer bytes.
        compile: Compile the decoding: slow to start, then faster.
    """
    week = 7 * 24 * 3600.0  # the other ranks wait while the user thinks
    build = {"device": device, "dtype": dtype, "quantize": quantize, "compile": compile, "timeout": week}
    with _session(ckpt, tokenizer, max_seq_len, **build) as generator:
        talk = Conversation(generator, system)
        for line in _lines():
            try:
                if line.startswith("/"):
                    print(_command(talk, line))
                elif line.strip():
                    _answer(talk, line, speed, temperature, top_p, max_gen_len, seed)
            except LlamaError as error:
                print(f"({error})")


# -------------------------------------------------------------------------- the model, and the ends


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Within, a reader of our stdout that leaves, as `| head` does, ends the program without a word."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's flush at the end
        sys.exit(141)  # as a shell reports it


@contextlib.contextmanager
def _session(ckpt: str | None, tokenizer: str | None, max_seq_len: int, **build: Any) -> Iterator[Llama]:
    """The model for as long as somebody types and reads. Bytes that the terminal's encoding lacks are replaced."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    with reader_may_leave(), open_model(ckpt, tokenizer, max_seq_len, **build) as generator:
        yield generator


def open_model(ckpt: str | None, tokenizer: str | None, max_seq_len: int, **build: Any) -> Llama:
    """A generator of one row of the checkpoint, or of the demo model; `build` goes to `Llama.build`. Stdout is left to
    the text.
    """
    if ckpt is None and not DEMO.exists():
        raise LlamaError(
            f"the demo model, which ships with the package, is not at {DEMO}: install llama again, or pass --ckpt"
        )
    stdout, sys.stdout = sys.stdout, sys.stderr  # for `build`'s report
    try:
        return Llama.build(ckpt or str(DEMO), tokenizer, max_seq_len, 1, **build)
    finally:
        if sys.stdout is sys.stderr:  # else `build` has muted this rank
            sys.stdout = stdout


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _piped() -> str | None:
    """What is piped in on the first rank, if anything is."""
    if parallel.rank() > 0 or sys.stdin is None or _at_terminal():
        return None
    return sys.stdin.read().rstrip("\n")


# --------------------------------------------------------------------------------------------- chat


def _lines() -> Iterator[str]:
    """What the user types on the first rank, on every rank, until Ctrl-D."""
    if parallel.rank() == 0 and _at_terminal():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # `input` then knows the arrow keys
        print("(/help lists the commands, Ctrl-D ends)")
    while True:
        line = parallel.broadcast_object(_read_line() if parallel.rank() == 0 else None)
        if line is None:
            return
        yield line


def _read_line() -> str | None:
    """The next line, None at the end of the input."""
    if sys.stdin is None:
        return None
    try:
        return input("> " if _at_terminal() else "")
    except EOFError:
        if _at_terminal():
            print()
        return None
    except KeyboardInterrupt:
        if parallel.world_size() > 1:  # whoever started the ranks is ending them all
            raise
        print("\n(Ctrl-D ends)")
        return ""


def _answer(
    talk: Conversation, line: str, speed: bool, temperature: float, top_p: float, limit: int | None, seed: int | None
) -> None:
    """Print the answer as it comes, then what there is to say about it."""
    begin = time.perf_counter()
    try:
        with contextlib.closing(talk.ask(line, temperature, top_p, limit, seed=seed)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if parallel.world_size() > 1:
            raise
        print(" (stopped)", end="")
    print()
    took = time.perf_counter() - begin
    if talk.finish_reason == "length":
        print("(cut: the answer has reached --max_gen_len or the end of the window, --max_seq_len)")
    if talk.dropped:
        print(f"({talk.dropped} old messages no longer fit in the window and were dropped)")
    if talk.completion_tokens and not talk.kept:
        print("(the answer holds one of the chat format's own tags: question and answer are not kept)")
    if speed and talk.completion_tokens:
        print(f"({talk.completion_tokens} tokens, {talk.completion_tokens / took:.1f} a second)")


def _command(talk: Conversation, line: str) -> str:
    """Carry out one /command; returns what to say about it."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/save", "/load") and not rest:
        return f"({name} needs a file: {name} FILE)"
    if name == "/help":
        return _HELP
    if name == "/reset":
        talk.reset()
        return "(forgotten)"
    if name == "/system":
        talk.system = rest
        return "(system text set)" if rest else "(no system text)"
    if name == "/save":
        _write_dialog(rest, talk.messages())
        return f"(saved {len(talk.messages())} messages to {rest})"
    if name == "/load":
        talk.load(_read_dialog(rest))
        return f"(loaded {len(talk.messages())} messages from {rest})"
    return f"({name} is no command; /help lists them, and a question may begin with a space)"


def _write_dialog(path: str, messages: Any) -> None:
    """Only the first rank writes; LlamaError there."""
    if parallel.rank() == 0:
        try:
            text = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
            Path(path).expanduser().write_text(text, encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as error:
            raise LlamaError(f"not saved: {error}") from error


def _read_dialog(path: str) -> Any:
    """What the file holds for the first rank, on every rank; LlamaError on every rank alike."""
    found: Any = None
    if parallel.rank() == 0:
        try:
            found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: nested too deeply, or ~nobody
            found = LlamaError(f"{path} is no dialog that /save wrote: {error}")
    found = parallel.broadcast_object(found)
    if isinstance(found, LlamaError):
        raise found
    return found


# ----------------------------------------------------------------------------------- before Fire


def arguments(commands: Mapping[str, Callable[..., Any]], argv: Sequence[str]) -> list[str]:
    """`argv` as Fire needs it: values of parameters that are texts in quotes, since it would read "Hello, world" as a
    tuple and 1e5 as 100000.0. LlamaError for what the command does not take, which Fire would say after having run it.
    """
    if not argv or argv[0] not in commands or {"--", "--help", "-h"} & set(argv):
        return list(argv)
    command, *rest = argv
    known = inspect.signature(commands[command]).parameters
    places = [name for name, parameter in known.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    quoted, flag = [command], ""
    for arg in rest:
        if arg.startswith("--") or (arg.startswith("-") and arg[1:2].isalpha()):
            start, equals, value = arg.partition("=")
            flag = _parameter(command, known, start)
            quoted.append(start + equals + _quoted(known[flag], value) if equals else arg)
            flag = "" if equals else flag
        elif flag or places:
            quoted.append(_quoted(known[flag or places.pop(0)], arg))
            flag = ""
        else:
            raise LlamaError(f"{command} does not know what to do with {arg!r}: a text of several words needs quotes")
    return quoted


def _parameter(command: str, known: Mapping[str, inspect.Parameter], start: str) -> str:
    """The parameter that a flag is for: --name, --noname, or -n where only one name begins so."""
    name = start.lstrip("-").replace("-", "_")
    matches = [key for key in known if name in (key, f"no{key}") or (len(name) == 1 and key.startswith(name))]
    if len(matches) != 1:
        raise LlamaError(f"{command} takes no {start}; it takes {', '.join('--' + key for key in known)}")
    return matches[0]


def _quoted(parameter: inspect.Parameter, value: str) -> str:
    is_text = parameter.annotation is str or str in get_args(parameter.annotation)
    return repr(value) if is_text else value
