"""The lock of a store, which a dying cache may meet in its own thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

LOG = logging.getLogger("hf_kvcodecs.store")


class StoreLock:
    """A re-entrant lock that can put off what must not happen while its own thread holds it.

    Python may collect an object at any allocation. A cache that writes its reply to the store then
    would do so in the middle of whatever this thread is changing there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = self._depth = 0
        self._waiting: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        outermost = not self._depth
        if outermost:
            self._owner = 0
        self._lock.release()
        while outermost and self._waiting:
            try:
                action = self._waiting.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                action()
            except Exception:  # like in a finaliser: not the fault of whoever comes by
                LOG.exception("What a deleted cache held could not be stored")

    def soon(self, action: Callable[[], object]) -> None:
        """Calls ``action``: now, or as soon as this thread has left the lock."""
        if self._owner == threading.get_ident():
            self._waiting.append(action)
        else:
            action()
