"""KVzip's second reading: the model repeats its context, and its attention is watched."""

from __future__ import annotations

import torch

from ..caches.speculative import SpeculativeKVCache
from .inputs import RowInputs

CHUNK_TOKENS = 2048  # repeated at a time, unless the scorer says otherwise


def repeat_context(inputs: RowInputs, ids: torch.Tensor) -> None:
    """Has the model read the part of ``ids`` ``[1, tokens]`` again that was not repeated before,
    behind the exact cache, some tokens at a time, and takes that reading back.

    Raises:
        ValueError: ``ids`` lacks tokens that the cache holds.
    """
    cache: SpeculativeKVCache = inputs.cache
    scorer = cache.compressor.dropper.scorer if cache.compressor.dropper else None
    if scorer is None or not scorer.repeats_context:
        return
    chunk_tokens = getattr(scorer, "chunk_tokens", CHUNK_TOKENS)
    tokens = int(cache.get_seq_length())
    if ids.shape[1] < tokens:
        raise ValueError(
            f"input_ids: expected all {tokens} tokens that the cache holds, got {ids.shape[1]}: "
            f"{scorer.name} repeats its context; pass the whole conversation"
        )
    instruction = ids.new_tensor(getattr(scorer, "instruction", ()), dtype=ids.dtype)[None]
    for start in range(cache.repeated_tokens, tokens, chunk_tokens):
        stop = min(start + chunk_tokens, tokens)
        read = torch.cat([instruction, ids[:, start:stop]], dim=1)
        with cache.repeating(start, stop):
            inputs.forward(read, tokens, keep=1)
