"""Fits the online scorer to a model: it learns to guess what KVzip's second reading would see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..caches.compat import CACHE_ARGUMENT
from ..caches.speculative import SpeculativeKVCache
from ..compressors import Compressor, Dropper, KVzip, Online
from ..compressors.online import features
from .inputs import RowInputs
from .repetition import repeat_context

FLOOR = 1e-6  # of an attention weight, before its logarithm is taken


@torch.no_grad()
def fit_online(
    model: Any, texts: Iterable[torch.Tensor], *, ridge: float = 1e-2, chunk_tokens: int = 512
) -> Online:
    """An :class:`Online` scorer for ``model``, by ridge regression in closed form.

    Args:
        model: a causal language model under sdpa attention.
        texts: token ids ``[1, tokens]`` like those the model will read; a few thousand tokens do.
        ridge: weight of the penalty, relative to the features' mean square.
        chunk_tokens: tokens repeated at a time.

    Each text costs about two prefills.

    Raises:
        ValueError: no texts.
    """
    compressor = Compressor(dropper=Dropper(scorer=KVzip(chunk_tokens=chunk_tokens), keep=0.5))
    squares: list[torch.Tensor] = []
    products: list[torch.Tensor] = []
    for ids in texts:
        cache = SpeculativeKVCache(model.config, compressor=compressor)
        model(ids, use_cache=True, **{CACHE_ARGUMENT: cache})
        repeat_context(RowInputs(model, cache, {}, ids.shape[1]), ids)
        for place, layer in enumerate(cache.own_layers):
            keys, values = cache.dense(layer.index)
            assert layer.observed is not None
            seen = features(keys[0], values[0]).double()
            wanted = layer.observed.cpu().double().clamp_min(FLOOR).log().unsqueeze(-1)
            if place == len(squares):
                squares.append(torch.zeros(()))
                products.append(torch.zeros(()))
            squares[place] = squares[place] + seen.transpose(1, 2) @ seen
            products[place] = products[place] + seen.transpose(1, 2) @ wanted
    if not squares:
        raise ValueError("texts: expected token ids [1, tokens] of at least one text, got none")
    weights = []
    for square, product in zip(squares, products, strict=True):
        penalty = ridge * square.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        penalised = square + penalty * torch.eye(square.shape[-1], dtype=torch.float64)
        weights.append(torch.linalg.solve(penalised, product).squeeze(-1).float())
    return Online(weights=_by_index(weights, cache))


def _by_index(weights: list[torch.Tensor], cache: SpeculativeKVCache) -> torch.Tensor:
    """Weights ``[layers, kv_heads, features]`` by a layer's place in the model."""
    table = weights[0].new_zeros((len(cache.layers), *weights[0].shape))
    for layer, fitted in zip(cache.own_layers, weights, strict=True):
        table[layer.index] = fitted
    return table
