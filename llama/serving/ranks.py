"""For servers on many ranks: the first rank takes the requests, the others do every call along with it."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from .. import distributed as parallel
from ..errors import LlamaError
from ..generation import Llama

CALLS = ("generate", "text_completion", "chat_completion", "score", "embed")


def serve(generator: Llama, lead: Callable[[Callable[..., Any]], None]) -> None:
    """Run `lead(call)` on the first rank; `call("chat_completion", dialogs, ...)` makes that call on all ranks.

    `lead` is where a web server runs; its threads may share `call`. The other ranks return when it does. A wait for the
    next request counts against `build`'s `timeout`: make that longer than the server may be idle.
    """
    if parallel.rank() > 0:
        _follow(generator)
        return
    lock = threading.Lock()

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in CALLS:
            raise LlamaError(f"call({name!r}) is none of {', '.join(CALLS)}")
        with lock:
            parallel.broadcast_object((name, args, kwargs))
            return getattr(generator, name)(*args, **kwargs)

    try:
        lead(call)
    finally:
        with lock:
            parallel.broadcast_object(None)


def _follow(generator: Llama) -> None:
    """Repeat the first rank's calls until it is done; what is a mistake there is the same mistake here."""
    while (request := parallel.broadcast_object(None)) is not None:
        name, args, kwargs = request
        with contextlib.suppress(LlamaError, TypeError):
            getattr(generator, name)(*args, **kwargs)
