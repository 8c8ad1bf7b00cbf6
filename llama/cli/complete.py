"""python -m llama complete: one prompt and its continuation, streamed."""

import sys

from .. import distributed as parallel
from .output import printable
from .session import adapters, at_terminal, open_model

DEFAULT_PROMPT = "Once upon a time"


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
    lora: list[str] | None = None,
    lora_scale: list[float] | None = None,
) -> None:
    """Print a prompt and stream the model's continuation of it.

    For example: python -m llama complete "Once upon a time" --seed 3

    Args:
        prompt: The text to continue, in quotes. If omitted, read from a pipe; at a terminal, "Once upon a time".
        ckpt: The checkpoint, a folder or a file; by default the demo model.
        tokenizer: The tokenizer file; by default the one next to the checkpoint.
        max_seq_len: The most tokens in prompt and continuation together.
        max_gen_len: The most tokens to generate; by default as many as fit.
        temperature: Sampling temperature; 0 is greedy decoding.
        top_p: Nucleus sampling: the probability mass to sample from.
        seed: An integer that makes sampling reproducible.
        device: cpu, cuda or mps; by default a GPU if there is one.
        dtype: float32, bfloat16 or float16; by default what suits the device.
        quantize: int8, int4 or int8-dynamic: quantize the weights while loading.
        compile: Compile the decoding step: slower to start, then faster.
        lora: The folder of a LoRA adapter to merge while loading; may be given several times.
        lora_scale: What the adapter is multiplied with; once for all, or once for each adapter. Default: 1.0.
    """
    build = {"device": device, "dtype": dtype, "quantize": quantize, "compile": compile}
    build |= adapters(lora, lora_scale)
    with open_model(ckpt, tokenizer, max_seq_len, **build) as generator:
        prompt = parallel.broadcast_object(_piped_prompt() if prompt is None else prompt)
        print(printable(prompt), end="", flush=True)
        for chunk in generator.stream_text(prompt, temperature, top_p, max_gen_len, seed=seed, keep_space=True):
            print(printable(chunk), end="", flush=True)
        print()


def _piped_prompt() -> str:
    """What is piped into the first rank, else the default prompt."""
    if parallel.rank() > 0 or sys.stdin is None or at_terminal():
        return DEFAULT_PROMPT
    return sys.stdin.read().rstrip("\n") or DEFAULT_PROMPT
