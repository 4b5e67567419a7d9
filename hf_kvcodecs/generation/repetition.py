"""KVzip's second reading: the model repeats its context, and its attention is watched."""

from __future__ import annotations

import torch

from ..caches.speculative import SpeculativeKVCache
from ..compressors import KVzip
from .inputs import RowInputs


def repeat_context(inputs: RowInputs, ids: torch.Tensor) -> None:
    """Has the model read the part of ``ids`` ``[1, tokens]`` again that was not repeated before,
    behind the exact cache, some tokens at a time, and takes that reading back.

    Raises:
        ValueError: ``ids`` lacks tokens that the cache holds.
    """
    cache: SpeculativeKVCache = inputs.cache
    scorer = cache.compressor.dropper.scorer if cache.compressor.dropper else None
    if not isinstance(scorer, KVzip):
        return
    tokens = int(cache.get_seq_length())
    if ids.shape[1] < tokens:
        raise ValueError(
            f"input_ids: expected all {tokens} tokens that the cache holds, got {ids.shape[1]}: "
            f"{scorer.name} repeats its context; pass the whole conversation"
        )
    instruction = ids.new_tensor(scorer.instruction, dtype=ids.dtype)[None]
    for start in range(cache.repeated_tokens, tokens, scorer.chunk_tokens):
        stop = min(start + scorer.chunk_tokens, tokens)
        read = torch.cat([instruction, ids[:, start:stop]], dim=1)
        with cache.repeating(start, stop):
            inputs.forward(read, tokens, keep=1)
