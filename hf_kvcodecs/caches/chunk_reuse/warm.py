"""Documents stored ahead of any prompt: whole, behind sink tokens, in overlapping windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat import CACHE_ARGUMENT


def windows(tokens: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Where a document of ``tokens`` tokens is cut: (start, stop), each at most ``room`` long,
    neighbours sharing ``overlap``."""
    if not 0 <= overlap < room:
        raise ValueError(
            f"overlap_tokens: expected 0 to {room - 1} (the model reads {room} tokens at once), "
            f"got {overlap}"
        )
    found, start = [], 0
    while start + room < tokens:
        found.append((start, start + room))
        start += room - overlap
    return [*found, (start, tokens)]


@torch.no_grad()
def warm(
    model: Any,
    new_cache: Callable[[], Any],
    ids: torch.Tensor,
    sink_ids: torch.Tensor | None,
    overlap_tokens: int,
    pin: bool,
) -> int:
    """See :meth:`ChunkReuseCache.warm`."""
    if ids.dim() != 2 or len(ids) != 1 or not ids.shape[1]:
        raise ValueError(f"ids: expected one document [1, tokens], got {tuple(ids.shape)}")
    if sink_ids is None:
        begin = getattr(model.config.get_text_config(decoder=True), "bos_token_id", None)
        sink_ids = torch.tensor([[begin] if isinstance(begin, int) else []], dtype=torch.int64)
    if ids.shape[1] and sink_ids.shape[1] and int(ids[0, 0]) == int(sink_ids[0, 0]):
        sink_ids = sink_ids[:, :0]  # the document brings its own
    room = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30) - sink_ids.shape[1]
    stored = 0
    for start, stop in windows(ids.shape[1], room, overlap_tokens):
        cache = new_cache()
        text = torch.cat([sink_ids.to(ids), ids[:, start:stop]], 1).to(model.device)
        model(text, logits_to_keep=1, use_cache=True, **{CACHE_ARGUMENT: cache})
        stored += cache.report().stored_tokens
        if pin:
            cache.pin()
    return stored
