"""``enable``: ``model.generate`` chooses the decoding that goes with the cache it is given."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from ..caches.chunk_reuse import ChunkReuseCache
from ..caches.speculative import SpeculativeKVCache
from .draft_verify import draft_verify

Model = TypeVar("Model")
_MARK = "_hf_kvcodecs_original"


def enable(model: Model) -> Model:
    """Makes ``model.generate`` use :func:`draft_verify` when it is given a
    :class:`SpeculativeKVCache`, or a :class:`ChunkReuseCache` with ``verify=True``, and no
    ``custom_generate``; returns the model.

    Only this object's ``generate`` is replaced; :func:`disable` gives it back.
    """
    generate: Any = model.generate  # type: ignore[attr-defined]
    if hasattr(generate, _MARK):
        return model

    @functools.wraps(generate)
    def choosing(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        verifies = isinstance(cache, ChunkReuseCache) and cache.verify
        wanted = verifies or isinstance(cache, SpeculativeKVCache)
        if wanted and kwargs.get("custom_generate") is None:
            kwargs["custom_generate"] = draft_verify
        return generate(*args, **kwargs)

    setattr(choosing, _MARK, generate)
    model.generate = choosing  # type: ignore[attr-defined]
    return model


def disable(model: Model) -> Model:
    """Undoes :func:`enable`; returns the model. A model that was not enabled is left alone."""
    if hasattr(model.generate, _MARK):  # type: ignore[attr-defined]
        del model.generate  # type: ignore[attr-defined]
    return model
