"""What callers hand in, checked: each function returns the value in its plain form, or raises a LlamaError that names
the argument, its value, the limit and the next step.
"""

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor

from .errors import LlamaError


def as_integer(value: Any) -> int | None:
    """`value` as an int where it stands for one integer, as NumPy's and torch's do, booleans not; else None."""
    try:
        number = index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers, or without any
        return None
    return None if _is_boolean(value) else number


def as_number(value: Any) -> float | None:
    """`value` as a float where Python can turn it into one, texts and booleans excepted; else None."""
    if (
        _is_boolean(value)
        or "complex" in str(getattr(value, "dtype", ""))
        or isinstance(value, (str, bytes, bytearray))
    ):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers, an int of 400 digits
        return None


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def check_integer(name: str, value: Any, low: int, words: str) -> int:
    """`value` as an int of at least `low`; what counts as one says `as_integer`."""
    number = as_integer(value)
    if number is None or number < low:
        raise LlamaError(f"{name}={value!r:.80} must be {words}")
    return number


def check_size(name: str, value: Any) -> int:
    """`value` as an int of at least 1."""
    return check_integer(name, value, 1, "an integer of at least 1")


def check_number(name: str, value: Any, low: float, high: float, words: str) -> float:
    """`value` as a finite float from `low` to `high`; what counts as one says `as_number`."""
    number = as_number(value)
    if number is None or not (low <= number <= high and math.isfinite(number)):
        raise LlamaError(f"{name}={value!r:.80} must be {words}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """`value` as a bool, as `if value` has it."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several
        raise LlamaError(f"{name}={value!r:.80} must be True or False") from None


def check_list(name: str, value: Any, items: str) -> list[Any]:
    """Whatever can be iterated over but a text or mapping as a list, taken once: a generator would be empty the second
    time.
    """
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        iterator = iter(value.tolist() if hasattr(value, "tolist") else value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
        raise LlamaError(f"{name} is {value!r:.60}, a {type(value).__name__}; it must be a list of {items}") from None
    return list(iterator)


def check_token_ids(name: str, value: Any) -> list[int]:
    """A list of integers from anything that holds some, NumPy's and torch's too. Their range is not checked."""
    ids = []
    for position, token in enumerate(check_list(name, value, "token ids")):
        number = as_integer(token)
        if number is None:
            raise LlamaError(f"{name} has {token!r:.60} at position {position}; token ids are integers")
        ids.append(number)
    return ids


def check_prompts(prompt_tokens: Any, max_seq_len: int, vocab_size: int | None) -> list[list[int]]:
    """Prompts as lists of ids that fit the window and the vocabulary (None: any id from 0 up)."""
    items = "prompts, each a list of token ids (text goes to text_completion)"
    prompts = check_list("prompt_tokens", prompt_tokens, items)
    return [_check_prompt(row, prompt, max_seq_len, vocab_size) for row, prompt in enumerate(prompts)]


def _check_prompt(row: int, prompt: Any, max_seq_len: int, vocab_size: int | None) -> list[int]:
    ids = check_token_ids(f"prompt {row}", prompt)
    if not ids:
        raise LlamaError(f"prompt {row} has no tokens; it needs at least one (an empty text is BOS alone)")
    if len(ids) > max_seq_len:
        raise LlamaError(
            f"prompt {row} has {len(ids)} tokens, more than max_seq_len={max_seq_len}: "
            f"shorten it or build with a larger max_seq_len"
        )
    for position, token in enumerate(ids):
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            valid = "0 up" if vocab_size is None else f"0 to {vocab_size - 1}"
            raise LlamaError(f"prompt {row} has id {token} at position {position}; ids go from {valid}")
    return ids


def nearest(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'temperature'? " for a name that is none of the `known`; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""


def check_text(name: str, value: Any, hint: str) -> str:
    """`value` itself; `hint` says in the error what is taken instead of another type."""
    if not isinstance(value, str):
        raise LlamaError(f"{name} is a {type(value).__name__}; {hint}")
    return value


def check_stop_strings(stops: Any) -> tuple[str, ...]:
    """Any iterable of texts, taken once; an empty text among them is an error, since it would stop everything."""
    listed = tuple(check_list("stop", stops, "texts, none of them empty"))
    if not all(isinstance(stop, str) and stop for stop in listed):
        raise LlamaError(f"stop={listed!r:.80} must be a list of texts, none of them empty")
    return listed


def check_layers(layers: Any, n_layers: int) -> list[int]:
    """Numbers of blocks, 0 to n_layers - 1, and -1 for the final norm; None is all of them."""
    if layers is None:
        return [*range(n_layers), -1]
    listed = check_token_ids("layers", layers)
    for layer in listed:
        if not -1 <= layer < n_layers:
            raise LlamaError(f"layers names {layer}; blocks go from 0 to {n_layers - 1}, -1 is after the final norm")
    return listed


def check_position(start_pos: Any) -> int:
    """`start_pos` of `Transformer.forward` as an int."""
    position = as_integer(start_pos)
    if position is None:
        raise LlamaError(f"start_pos={start_pos!r:.60} must be an integer, or a tensor of one for each row")
    return position


def check_id_tensor(tokens: Any) -> None:
    """LlamaError unless these are ids (bsz, seqlen), by all that can be seen without their values."""
    plain = isinstance(tokens, Tensor) and tokens.layout == torch.strided and tokens.device.type != "meta"
    if not plain or tokens.ndim != 2 or not tokens.numel() or tokens.dtype not in (torch.int64, torch.int32):
        found = type(tokens).__name__
        if isinstance(tokens, Tensor):
            found = f"{tokens.dtype}, {tokens.layout}, {tuple(tokens.shape)}, on {tokens.device}"
        raise LlamaError(f"tokens is {found}; it must be a tensor (bsz, seqlen) of ids, torch.int64 or torch.int32")


def environment_integer(name: str, default: str) -> int:
    """A variable as torchrun sets it, an integer from 0 up. LlamaError where it is something else."""
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise LlamaError(
            f"the environment says {name}={text!r:.60}, which must be an integer: unset it, or use torchrun"
        )
    return int(text)
