"""A server on several ranks: the first rank takes the requests, all ranks run each call."""

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .. import distributed as parallel
from ..engine.cache import CacheLock, cache_state
from ..errors import LlamaError
from ..generation import Llama
from ..interrupts import restoring

CALLS = ("generate", "text_completion", "chat_completion", "score", "embed")


def serve(generator: Llama, run_server: Callable[[Callable[..., Any]], None]) -> None:
    """Run `run_server(call)` on the first rank; `call("chat_completion", dialogs, ...)` runs that method on all.

    `run_server` is where a web server runs; `call` may be shared by its threads, and raises what the method raises,
    after which it serves on. The other ranks return when `run_server` does. On several ranks any other use of the
    generator meanwhile is a LlamaError. Waiting for a request counts against `build`'s `timeout`, so make that longer
    than the server may be idle.
    """
    if parallel.rank() > 0:
        _repeat_calls(generator)
        return
    turns, cache, ended = CacheLock(), cache_state(generator).lock, threading.Event()
    nobody = 0 if parallel.world_size() > 1 else None

    def reserve(thread: int | None) -> None:
        cache.reserved_for = thread

    def run(request: bytes) -> Iterator[Any]:
        if ended.is_set():
            raise LlamaError("the server has ended: serve() has returned, and the other ranks no longer listen")
        parallel.broadcast_object(request)
        if nobody is not None:
            reserve(threading.get_ident())
        yield restoring(lambda: _run(generator, request), lambda: reserve(nobody))

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in CALLS:
            raise LlamaError(f"call({name!r}) must name one of {', '.join(CALLS)}")
        try:
            request = pickle.dumps((name, args, kwargs))
        except Exception as error:  # pickle's own have no common class
            raise LlamaError(f"call({name!r}, ...) cannot be sent to the other ranks: {error!s:.200}") from error
        [result] = turns.hold(lambda: run(request))
        return result

    def end() -> Iterator[None]:
        ended.set()
        parallel.broadcast_object(None)
        yield None

    reserve(nobody)
    try:
        restoring(lambda: run_server(call), lambda: reserve(None))
    finally:
        list(turns.hold(end))


def _run(generator: Llama, request: bytes) -> Any:
    """One call, on every rank; where it fails on one, it fails on all."""
    with parallel.raise_on_all_ranks("reading a call"):
        name, args, kwargs = pickle.loads(request)
    with parallel.raise_on_all_ranks("running a call"):
        return getattr(generator, name)(*args, **kwargs)


def _repeat_calls(generator: Llama) -> None:
    """Repeat the first rank's calls until it sends None; what a call raises there it raises here, to no effect."""
    while (request := parallel.broadcast_object(None)) is not None:
        with contextlib.suppress(Exception):
            _run(generator, request)
