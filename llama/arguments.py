"""What callers hand in, checked: each function returns the value in its plain form, or raises a LlamaError that names
the argument, its value, the limit and the next step.
"""

import math
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from .errors import LlamaError


def check_integer(name: str, value: Any, low: int, words: str) -> int:
    """`value` as an int of at least `low`; NumPy's and torch's integers are good, booleans are not."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or index(value) < low:
        raise LlamaError(f"{name}={value!r:.80} must be {words}")
    return index(value)


def check_number(name: str, value: Any, low: float, high: float, words: str) -> float:
    """`value` as a finite float from `low` to `high`; anything that Python can turn into a float is good but for texts
    and booleans.
    """
    if isinstance(value, (bool, str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise LlamaError(f"{name}={value!r:.80} must be {words}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers, an int of 400 digits
        raise LlamaError(f"{name}={value!r:.80} must be {words}") from None
    if not (low <= number <= high and math.isfinite(number)):
        raise LlamaError(f"{name}={value!r:.80} must be {words}")
    return number


def check_list(name: str, value: Any, items: str) -> list[Any]:
    """Any iterable but a text or mapping as a list, taken once: a generator would be empty the second time."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise LlamaError(f"{name} is {value!r:.60}, a {type(value).__name__}; it must be a list of {items}")
    try:
        return list(value)
    except TypeError:  # a 0-d tensor
        raise LlamaError(f"{name} is {value!r:.60}; it must be a list of {items}") from None


def check_token_ids(name: str, value: Any) -> list[int]:
    """A list of integers from anything that holds some; NumPy's and torch's integers are good. The range is not checked."""
    ids = check_list(name, value, "token ids")
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not _is_integer(token):
            raise LlamaError(f"{name} has {token!r:.60} at position {position}; token ids are integers")
    return [index(token) for token in ids]


def _is_integer(value: Any) -> bool:
    """Whether `value` stands for one integer: an integer tensor or array of one element does, a float tensor not."""
    try:
        index(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def check_prompts(prompt_tokens: Any, max_seq_len: int, vocab_size: int | None) -> list[list[int]]:
    """Prompts as lists of ids that fit the window and the vocabulary (None: any id from 0 up)."""
    if isinstance(prompt_tokens, (str, bytes)) or not isinstance(prompt_tokens, Iterable):
        raise LlamaError(
            f"prompt_tokens is a {type(prompt_tokens).__name__}; it must be a list of prompts, each a list of "
            f"token ids (text goes to text_completion)"
        )
    prompts = check_list("prompt_tokens", prompt_tokens, "prompts, each a list of token ids")
    return [_check_prompt(row, prompt, max_seq_len, vocab_size) for row, prompt in enumerate(prompts)]


def _check_prompt(row: int, prompt: Any, max_seq_len: int, vocab_size: int | None) -> list[int]:
    ids = check_token_ids(f"prompt {row}", prompt.tolist() if hasattr(prompt, "tolist") else prompt)
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


def check_text(name: str, value: Any, hint: str) -> str:
    """`value` itself; `hint` says in the error what is taken instead of another type."""
    if not isinstance(value, str):
        raise LlamaError(f"{name} is a {type(value).__name__}; {hint}")
    return value


def check_stop_strings(stops: Any) -> tuple[str, ...]:
    """Any iterable of texts, taken once; an empty text among them is an error, since it would stop everything."""
    if isinstance(stops, str) or not isinstance(stops, Iterable):
        raise LlamaError(f"stop={stops!r:.80} must be a list of texts, none of them empty")
    listed = tuple(stops)
    if not all(isinstance(stop, str) and stop for stop in listed):
        raise LlamaError(f"stop={listed!r:.80} must be a list of texts, none of them empty")
    return listed


def check_stop_ids(stop_ids: Any) -> frozenset[int]:
    """Any iterable of integers, taken once, without repetitions."""
    if isinstance(stop_ids, (str, bytes)) or not isinstance(stop_ids, Iterable):
        raise LlamaError(f"stop_ids={stop_ids!r:.80} must be a list of token ids")
    listed = list(stop_ids)
    if not all(_is_integer(token) for token in listed):
        raise LlamaError(f"stop_ids={listed!r:.80} must be a list of token ids")
    return frozenset(index(token) for token in listed)


def check_layers(layers: Any, n_layers: int) -> list[int]:
    """Numbers of blocks, 0 to n_layers - 1, and -1 for the final norm; None is all of them."""
    if layers is None:
        return [*range(n_layers), -1]
    listed = check_token_ids("layers", layers)
    for layer in listed:
        if not -1 <= layer < n_layers:
            raise LlamaError(f"layers names {layer}; blocks go from 0 to {n_layers - 1}, -1 is after the final norm")
    return listed
