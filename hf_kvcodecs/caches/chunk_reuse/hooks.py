"""The hooks by which a cache learns its prompt: on the model only while some such cache lives."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import deque
from typing import Any, Protocol

from ...errors import CacheMisuseError


class Listener(Protocol):
    """A cache that is told of the forward calls it is used in."""

    model: Any

    def before_forward(self, kwargs: dict[str, Any]) -> dict[str, Any]: ...

    def after_forward(self, finished: bool) -> None: ...


_lock = threading.Lock()
# Of caches that died. That happens anywhere, also where this very thread holds the lock: so they
# wait here for whoever has it.
_departed: deque[weakref.ref[Any]] = deque()
_attached: weakref.WeakKeyDictionary[Any, tuple[list[Any], int]] = weakref.WeakKeyDictionary()


def attach(cache: Any, model: Any) -> None:
    """Hooks ``model`` as long as ``cache`` lives; many caches share the hooks."""
    with _lock:
        handles, users = _attached.get(model, ([], 0))
        if not users:
            handles = [
                model.register_forward_pre_hook(_before, with_kwargs=True),
                model.register_forward_hook(_after, with_kwargs=True, always_call=True),
            ]
        _attached[model] = handles, users + 1
    weakref.finalize(cache, _detach, weakref.ref(model)).atexit = False
    _settle()


def _detach(reference: weakref.ref[Any]) -> None:
    _departed.append(reference)
    _settle()


def _settle() -> None:
    """Takes leave of those that departed; of none while another call does, which looks again."""
    while _departed and _lock.acquire(blocking=False):
        try:
            while _departed:
                _leave(_departed.popleft()())
        finally:
            _lock.release()


def _leave(model: Any) -> None:
    if model is None:
        return
    handles, users = _attached[model]
    if users == 1:
        for handle in handles:
            handle.remove()
        del _attached[model]
    else:
        _attached[model] = handles, users - 1


def _before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache = _listener(module, args, kwargs)
    if cache is None:
        return None
    if cache.model is not module:
        raise CacheMisuseError(
            "This ChunkReuseCache was made for another model object: make one with the model that "
            "is called, ChunkReuseCache(model, store)"
        )
    named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
    return (), cache.before_forward(named | kwargs)


def _after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = _listener(module, args, kwargs)
    if cache is not None and cache.model is module:
        cache.after_forward(output is not None)


def _listener(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Listener | None:
    from .cache import ChunkReuseCache

    values = [*args, kwargs.get("cache"), kwargs.get("past_key_values")]
    return next((value for value in values if isinstance(value, ChunkReuseCache)), None)
