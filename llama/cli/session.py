"""What complete, chat and trace share: the model they open, and whether a person is typing."""

import sys
from pathlib import Path
from typing import Any

from ..distributed import choose_threads
from ..errors import LlamaError
from ..generation import Llama

_INSTALLED = Path(__file__).resolve().parents[1] / "demo"
DEMO = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "checkpoints" / "demo"


def open_model(ckpt: str | None, tokenizer: str | None, max_seq_len: int, **build: Any) -> Llama:
    """A generator with batch size 1 from `ckpt`, or from the demo model; `build` goes to `Llama.build`.

    What `Llama.build` prints goes to stderr: stdout is for the generated text alone.
    """
    if ckpt is None and not DEMO.exists():
        raise LlamaError(f"the demo model, shipped with llama, is not at {DEMO}: reinstall llama or pass --ckpt")
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        generator = Llama.build(ckpt or str(DEMO), tokenizer, max_seq_len, 1, **build)
        choose_threads(generator.model)
        return generator
    finally:
        if sys.stdout is sys.stderr:  # otherwise `build` has muted this rank
            sys.stdout = stdout


def adapters(lora: list[str] | None, lora_scale: list[float] | None) -> dict[str, Any]:
    """The options --lora and --lora_scale as arguments of `build`; one scale is for all adapters."""
    scales = lora_scale or [1.0]
    return {"lora": lora, "lora_scale": scales[0] if len(scales) == 1 else scales}


def at_terminal() -> bool:
    """Whether stdin is a terminal, not a pipe or a file."""
    return sys.stdin is not None and sys.stdin.isatty()
