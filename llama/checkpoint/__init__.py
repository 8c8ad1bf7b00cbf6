"""Checkpoints: open one of any known format, load it into a model on any number of ranks, write it in another."""

from .checkpoint import Checkpoint
from .loading import defaults, find_tokenizer, load, load_model, open_checkpoint, pick_scheme
from .memory import check_memory, memory_estimate

__all__ = [
    "Checkpoint",
    "check_memory",
    "defaults",
    "find_tokenizer",
    "load",
    "load_model",
    "memory_estimate",
    "open_checkpoint",
    "pick_scheme",
]
