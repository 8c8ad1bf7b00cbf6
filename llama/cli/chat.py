"""python -m llama chat: a conversation line by line, at a terminal or through a pipe, on one rank or many."""

import contextlib
import json
import time
from collections.abc import Iterator

from .. import distributed as parallel
from ..errors import LlamaError
from ..serving.conversation import Conversation
from .output import printable, read_regular_file, replace_file
from .session import adapters, at_terminal, open_model

_HELP = """/system TEXT  sets the system prompt; without TEXT, removes it
/reset        clears the conversation but keeps the system prompt
/save FILE    saves the conversation
/load FILE    continues a saved conversation
Ctrl-C stops an answer, Ctrl-D ends the chat"""
_LARGEST = 10_000_000  # bytes of a saved conversation
_WEEK = 7 * 24 * 3600.0  # seconds that the other ranks wait for the user's next line


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
    lora: list[str] | None = None,
    lora_scale: list[float] | None = None,
    chat_format: str | None = None,
) -> None:
    """Chat with a model, line by line, at a terminal or through a pipe.

    Type /help for the commands. Ctrl-C stops an answer but not the chat (under torchrun it ends both), Ctrl-D ends the
    chat. When the conversation outgrows the context window, the oldest turns are dropped, with a notice.

    Args:
        ckpt: The checkpoint of a chat model, a folder or a file; by default the demo model.
        tokenizer: The tokenizer file; by default the one next to the checkpoint.
        system: The system prompt.
        max_seq_len: The context window: the most tokens in conversation and answer together.
        max_gen_len: The most tokens in an answer; by default as many as fit.
        temperature: Sampling temperature; 0 is greedy decoding.
        top_p: Nucleus sampling: the probability mass to sample from.
        seed: An integer that makes sampling reproducible.
        speed: Show tokens/s after each answer.
        device: cpu, cuda or mps; by default a GPU if there is one.
        dtype: float32, bfloat16 or float16; by default what suits the device.
        quantize: int8, int4 or int8-dynamic: quantize the weights while loading.
        compile: Compile the decoding step: slower to start, then faster.
        lora: The folder of a LoRA adapter to merge while loading; may be given several times.
        lora_scale: What the adapter is multiplied with; once for all, or once for each adapter. Default: 1.0.
        chat_format: llama2, llama3, chatml or template (the checkpoint's own); by default what suits the checkpoint.
    """
    build = {"device": device, "dtype": dtype, "quantize": quantize, "compile": compile, "timeout": _WEEK}
    build |= {"chat_format": chat_format, **adapters(lora, lora_scale)}
    with open_model(ckpt, tokenizer, max_seq_len, **build) as generator:
        conversation = Conversation(generator, system)
        for line in _lines():
            try:
                if line.startswith("/"):
                    print(printable(_run_command(conversation, line)))
                elif line.strip():
                    answer = conversation.ask(line, temperature, top_p, max_gen_len, seed=seed)
                    _print_answer(conversation, answer, speed)
            except LlamaError as error:
                print(printable(f"({error})"))


def _lines() -> Iterator[str]:
    """The lines typed at the first rank, on every rank, until end of file."""
    if parallel.rank() == 0 and at_terminal():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives `input` the arrow keys
        print("(/help lists the commands, Ctrl-D ends the chat)")
    while (line := parallel.broadcast_object(_read_line() if parallel.rank() == 0 else None)) is not None:
        yield line


def _read_line() -> str | None:
    """The next line, None at end of file."""
    try:
        return input("> " if at_terminal() else "")
    except (EOFError, RuntimeError):  # RuntimeError: stdin is closed
        if at_terminal():
            print()
        return None
    except KeyboardInterrupt:
        if parallel.world_size() > 1:  # torchrun is ending all ranks
            raise
        print("\n(Ctrl-D ends the chat)")
        return ""


def _print_answer(conversation: Conversation, answer: Iterator[str], speed: bool) -> None:
    """Stream the answer to stdout, then any notices about it."""
    begin = time.perf_counter()
    try:
        with contextlib.closing(answer):  # type: ignore[type-var]
            for chunk in answer:
                print(printable(chunk), end="", flush=True)
    except KeyboardInterrupt:
        if parallel.world_size() > 1:
            raise
        print(" (stopped)", end="")
    print()
    seconds = time.perf_counter() - begin
    if conversation.finish_reason == "length":
        print("(truncated: the answer reached --max_gen_len or the end of the context window, --max_seq_len)")
    if conversation.dropped:
        print(f"({conversation.dropped} old messages no longer fit in the context window and were dropped)")
    if conversation.completion_tokens and not conversation.kept:
        print("(the answer contains special tags of the chat format: question and answer are not kept)")
    if speed and conversation.completion_tokens:
        print(f"({conversation.completion_tokens} tokens, {conversation.completion_tokens / seconds:.1f} tokens/s)")


def _run_command(conversation: Conversation, line: str) -> str:
    """Run one /command; returns the reply."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name in ("/save", "/load") and not argument:
        return f"({name} needs a file: {name} FILE)"
    if name == "/help":
        return _HELP
    if name == "/reset":
        conversation.reset()
        return "(conversation cleared)"
    if name == "/system":
        conversation.system = argument
        return "(system prompt set)" if argument else "(system prompt removed)"
    try:
        if name == "/save":
            return _save(conversation, argument)
        if name == "/load":
            return _load(conversation, argument)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: nested too deeply, or no such ~user
        return f"(cannot {name[1:]} {argument}: {error})"
    return f"(unknown command {name}: /help lists them; to ask about a text that starts with /, put a space before it)"


def _save(conversation: Conversation, path: str) -> str:
    """Write the messages as JSON, on the first rank only."""
    messages = conversation.messages()
    if parallel.rank() == 0:
        replace_file(path, json.dumps(messages, ensure_ascii=False, indent=1) + "\n")
    return f"(saved {len(messages)} messages to {path})"


def _load(conversation: Conversation, path: str) -> str:
    """Give every rank the first rank's file; if that cannot be read, the error is raised on all of them."""
    text = ""
    with parallel.raise_on_all_ranks("loading a conversation"):
        if parallel.rank() == 0:
            text = read_regular_file(path, _LARGEST)
    conversation.load(json.loads(parallel.broadcast_object(text)))
    return f"(loaded {len(conversation.messages())} messages from {path})"
