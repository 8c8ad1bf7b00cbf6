"""The cache of a model between calls: who may use it, which ids it still holds, and its rows."""

import contextlib
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from typing_extensions import Self

from ..errors import LlamaError
from ..model import Transformer
from .overrides import has_hooks_or_overrides

T = TypeVar("T")


class _Turn(NamedTuple):
    """One caller in the queue."""

    items: "weakref.ref[Generator[Any, None, None]]"
    thread: int
    streaming: bool

    def is_over(self) -> bool:
        """Whether what the caller iterates over has ended, by whatever exception, or is gone."""
        items = self.items()
        return items is None or inspect.getgeneratorstate(items) == inspect.GEN_CLOSED


class CacheLock:
    """Who may use a model's cache: callers in other threads wait, unless a stream is open.

    It is a queue that nobody has to leave: a turn is over when its generator is, so that no interrupt can keep it, and
    every change is one operation of a list, which no thread sees half done.
    """

    def __init__(self) -> None:
        self._queue: list[_Turn] = []
        self._process = os.getpid()
        self.reserved_for: int | None = None  # the only thread that may call, or 0 for none (serving/ranks.py)

    def hold(self, items: Callable[[], Iterator[T]], streaming: bool = False) -> Iterator[T]:
        """The items of `items()`; from the first one until they end or are dropped, the cache is theirs. LlamaError
        "busy" while a stream is open, or from within a call (a hook) of the same thread.
        """

        def run() -> Generator[T, None, None]:
            self.check_process()
            self._wait(_Turn(me, threading.get_ident(), streaming))
            yield from items()

        running = run()
        me = weakref.ref(running)
        return running

    def check_process(self) -> None:
        """LlamaError in a forked child: torch's threads, and another thread's turn, stayed behind in the parent."""
        if self._process != os.getpid():
            raise LlamaError(
                f"this process (pid {os.getpid()}) was forked from the one that made this generator (pid "
                f"{self._process}): use it there, or start this process with 'spawn' and build one here"
            )

    def _wait(self, turn: _Turn) -> None:
        """Queue up until all who came before are through."""
        self._queue.append(turn)
        while True:
            ahead = [other for other in self._queue[: self._queue.index(turn)] if not self._remove_if_over(other)]
            if self.reserved_for not in (None, turn.thread):
                raise LlamaError(
                    "this generator is being served on several ranks, and only this rank made that call: it would "
                    "wait for the others for ever; use the call(...) that serve() hands you"
                )
            if not ahead:
                return
            if ahead[0].streaming:
                raise LlamaError("this generator is busy: a stream on it is open; exhaust it or call its close() first")
            if any(other.thread == turn.thread for other in ahead):
                raise LlamaError(
                    "this generator is busy: the call came from within another one on it; let that end first"
                )
            time.sleep(0.002 * min(len(ahead), 25))

    def _remove_if_over(self, turn: _Turn) -> bool:
        over = turn.is_over()
        if over:
            with contextlib.suppress(ValueError):  # another thread was quicker
                self._queue.remove(turn)
        return over


@dataclass
class CacheState:
    """What all generators on one model share: the lock, and the ids that cache row 0 holds since a single stream."""

    lock: CacheLock = field(default_factory=CacheLock)
    ids: list[int] = field(default_factory=list)
    versions: tuple[Any, ...] = ()  # of weights and cache when `ids` was noted

    def note(self, model: Any, ids: Sequence[int]) -> None:
        """Cache row 0 holds the keys and values of `ids`."""
        self.ids, self.versions = list(ids), _versions(model)

    def take(self, model: Any) -> list[int]:
        """The ids that cache row 0 holds, none where weights or cache were written to since; they count once."""
        ids, self.ids = self.ids, []
        return ids if ids and self.versions == _versions(model) else []

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)()  # of another model


_STATES: "weakref.WeakKeyDictionary[Any, CacheState]" = weakref.WeakKeyDictionary()


def cache_state(generator: Any) -> CacheState:
    """The state of the generator's model; a stub that no weak key can hold gives each generator its own."""
    try:
        return _STATES.setdefault(generator.model, CacheState())
    except TypeError:
        return vars(generator).setdefault("_cache_state", CacheState())  # type: ignore[no-any-return]


def _versions(model: Any) -> tuple[Any, ...]:
    """Where weights and cache lie and how often they were written to (torch counts every write but those through
    `.data`), how often the model was called, and autocast. Never the same again for a model with hooks or overrides,
    which may do something else each time, and for tensors made in `inference_mode`, whose writes nobody counts.
    """
    if has_hooks_or_overrides(model):
        return (object(),)
    kind = model.freqs_cis.device.type
    tensors = [*model.parameters(), model.freqs_cis]
    for attention in model.attentions():
        tensors += [attention.cache_k, attention.cache_v]
    if any(tensor.is_inference() for tensor in tensors):
        return (object(),)
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (model.n_forwards, autocast, *((tensor.data_ptr(), tensor.dtype, tensor._version) for tensor in tensors))


def move_row(model: Transformer, source: int, target: int, end: int) -> None:
    """Copy what one cache row holds at positions below `end` to another row, in every layer."""
    for attention in model.attentions():
        attention.cache_k[target, :end] = attention.cache_k[source, :end]
        attention.cache_v[target, :end] = attention.cache_v[source, :end]
