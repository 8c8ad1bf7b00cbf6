"""A server on several ranks: the first rank takes the requests, all ranks run each call."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from .. import distributed as parallel
from ..errors import LlamaError
from ..generation import Llama

CALLS = ("generate", "text_completion", "chat_completion", "score", "embed")


def serve(generator: Llama, run_server: Callable[[Callable[..., Any]], None]) -> None:
    """Run `run_server(call)` on the first rank; `call("chat_completion", dialogs, ...)` runs that method on all.

    `run_server` is where a web server runs; `call` may be shared by its threads. The other ranks return when it
    does. Waiting for a request counts against `build`'s `timeout`, so make that longer than the server may be idle.
    """
    if parallel.rank() > 0:
        _repeat_calls(generator)
        return
    lock = threading.Lock()

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in CALLS:
            raise LlamaError(f"call({name!r}) must name one of {', '.join(CALLS)}")
        with lock:
            parallel.broadcast_object((name, args, kwargs))
            return getattr(generator, name)(*args, **kwargs)

    try:
        run_server(call)
    finally:
        with lock:
            parallel.broadcast_object(None)


def _repeat_calls(generator: Llama) -> None:
    """Repeat the first rank's calls until it sends None; a call that raises there raises here too."""
    while (request := parallel.broadcast_object(None)) is not None:
        name, args, kwargs = request
        with contextlib.suppress(LlamaError, TypeError):
            getattr(generator, name)(*args, **kwargs)
