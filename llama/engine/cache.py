"""Who may use a model's cache."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from ..errors import LlamaError


class CacheLock:
    """Who may use a model's cache: callers in other threads wait, unless a stream is open."""

    _of_model: ClassVar["weakref.WeakKeyDictionary[Any, CacheLock]"] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._streaming = False
        self.cached: list[int] = []  # ids that cache row 0 holds, where a single stream left it

    @classmethod
    def of(cls, generator: Any) -> "CacheLock":
        """The turn that all generators on one model share; a stub that no weak key can hold gives each its own."""
        try:
            return cls._of_model.setdefault(generator.model, cls())
        except TypeError:
            return vars(generator).setdefault("_turn", cls())  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def take(self, streaming: bool = False) -> Iterator[list[int]]:
        """Yields the ids that cache row 0 still holds. LlamaError "busy" while a stream is open, or from within a call
        (a hook) of the same thread.
        """
        while True:
            if self._streaming:
                raise LlamaError("this generator is busy: a stream on it is open; exhaust it or call its close() first")
            if self._owner == threading.get_ident():
                raise LlamaError(
                    "this generator is busy: the call came from within another one on it; let that end first"
                )
            if self._lock.acquire(timeout=0.05):
                break
        self._owner, self._streaming = threading.get_ident(), streaming
        cached, self.cached = self.cached, []
        try:
            yield cached
        finally:
            self._owner, self._streaming = None, False
            self._lock.release()
