"""The cache of a model between calls: who may use it, which ids it still holds, and its rows."""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import LlamaError
from ..model import Transformer
from .overrides import has_hooks_or_overrides


class CacheLock:
    """Who may use a model's cache: callers in other threads wait, unless a stream is open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None  # a thread
        self._streaming = False

    @contextlib.contextmanager
    def hold(self, streaming: bool = False) -> Iterator[None]:
        """Within, the cache is the caller's. LlamaError "busy" while a stream is open, or from within a call (a hook)
        of the same thread.
        """
        with self._changed:
            while self._owner is not None:
                self._check_busy()
                self._changed.wait()
            self._owner, self._streaming = threading.get_ident(), streaming
        try:
            yield
        finally:
            with self._changed:
                self._owner, self._streaming = None, False
                self._changed.notify_all()

    def _check_busy(self) -> None:
        if self._streaming:
            raise LlamaError("this generator is busy: a stream on it is open; exhaust it or call its close() first")
        if self._owner == threading.get_ident():
            raise LlamaError("this generator is busy: the call came from within another one on it; let that end first")


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


@contextlib.contextmanager
def cache_rows(model: Transformer, first: int) -> Iterator[None]:
    """Within, the rows that are fed are the cache's from row `first` on: new prompts beside rows that are decoding."""
    for attention in model.attentions():
        attention.first_row = first
    try:
        yield
    finally:
        for attention in model.attentions():
            attention.first_row = 0


def move_row(model: Transformer, source: int, target: int, end: int) -> None:
    """Copy what one cache row holds at positions below `end` to another row, in every layer."""
    for attention in model.attentions():
        attention.cache_k[target, :end] = attention.cache_k[source, :end]
        attention.cache_v[target, :end] = attention.cache_v[source, :end]
