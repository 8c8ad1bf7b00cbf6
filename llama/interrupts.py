"""State that is put back whatever line a KeyboardInterrupt hits, one of `finally` included.

An interrupt that hits the putting back itself would leave it half done, and one at the end of a `with` block would skip
it: so it is a function that may run twice, and does, the second time in a `finally` of its own.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
T = TypeVar("T")


def restoring(run: Callable[[], T], restore: Callable[[], object]) -> T:
    """The result of `run()`; `restore()` follows in any case, twice, and must not mind."""
    try:
        try:
            return run()
        finally:
            restore()
    finally:
        restore()


def restoring_after(items: Iterator[T], restore: Callable[[], object]) -> Iterator[T]:
    """`items`; `restore()` follows when they end or nobody wants more, twice, and must not mind."""
    try:
        try:
            yield from items
        finally:
            restore()
    finally:
        restore()


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.no_grad()` for a function. Torch's own puts the mode back in Python, which an interrupt can stop."""

    @functools.wraps(function)
    def without_grad(*args: P.args, **kwargs: P.kwargs) -> T:
        before = torch.is_grad_enabled()
        try:
            try:
                torch._C._set_grad_enabled(False)
                return function(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(before)
        finally:
            torch._C._set_grad_enabled(before)

    return without_grad


def remove_hooks(hooks: list[tuple[nn.Module, Callable[..., Any]]]) -> None:
    """Take forward hooks off their modules; none may be there. They are found by what they are: an interrupt within
    `register_forward_hook` leaves the hook and no handle.
    """
    for module, hook in hooks:
        for key in [key for key, found in list(module._forward_hooks.items()) if found is hook]:
            module._forward_hooks.pop(key, None)
