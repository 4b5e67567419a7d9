"""One decode step of the model or of the cache alone, and caches to take it with.

Shared by ``decode_cpu.py`` and its ``--memory`` mode; nothing to run here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.caches.view import KVView

Step = Callable[[Any], None]  # one decode step, given the cache


def model_step(model: Any, token: torch.Tensor) -> Step:
    """A step of the whole model, with ``token`` ``[1, 1]`` as its input."""

    def step(cache: Any) -> None:
        model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache})

    return step


def cache_step(filled: DynamicCache) -> Step:
    """A step of the cache alone: every layer takes one token and yields dense keys and values.

    The tokens are the last ones of ``filled``.
    """
    states = [
        (layer.keys[:, :, -1:].clone(), layer.values[:, :, -1:].clone()) for layer in filled.layers
    ]

    def layer_step(cache: Any, idx: int) -> None:  # its views die on return, as in attention
        for tensor in cache.update(*states[idx], idx):
            if isinstance(tensor, KVView):
                tensor.dense()

    def step(cache: Any) -> None:
        for idx in range(len(states)):
            layer_step(cache, idx)

    return step


def prefix(cache: DynamicCache, tokens: int) -> DynamicCache:
    """A copy of the first ``tokens`` tokens: what a prefill of just these would have left."""
    copy = DynamicCache()
    for idx, layer in enumerate(cache.layers):
        copy.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), idx)
    return copy


def undo(cache: Any) -> None:
    """Removes the token that a step has added."""
    cache.crop(-1)
    for layer in cache.layers:
        if not hasattr(layer, "pair"):
            # A crop leaves DynamicCache views that skip a row per head; decoding never sees such.
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()
