"""Checkpoints: open one of any known format, load it into a model on any number of ranks, write it in another."""

from .checkpoint import Checkpoint
from .fingerprint import compare_ranks
from .loading import load, load_model, open_checkpoint, pick_scheme, with_defaults
from .templates import choose_format, find_chat_template
from .tokenizers import open_tokenizer

__all__ = [
    "Checkpoint",
    "choose_format",
    "compare_ranks",
    "find_chat_template",
    "load",
    "load_model",
    "open_checkpoint",
    "open_tokenizer",
    "pick_scheme",
    "with_defaults",
]
