"""KVzip: what the model attends to while it repeats its context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import LayerStates, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class KVzip(Scorer):
    """The largest attention that a token receives from any query while the model reads its context
    a second time (arXiv 2505.23416).

    The decoder has the model read the context again, ``chunk_tokens`` at a time, behind the exact
    cache, and takes that reading back. It costs about a prefill.

    Args:
        chunk_tokens: tokens repeated at a time.
        instruction: token ids between the context and its repetition ("Repeat the previous
            context:"); none are needed.
    """

    name: ClassVar[str] = "kvzip"
    repeats_context: ClassVar[bool] = True

    chunk_tokens: int = 2048
    instruction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: expected at least 1, got {self.chunk_tokens!r}")

    def score(self, states: LayerStates) -> torch.Tensor:
        if states.observed is None:
            raise ValueError(
                "observed: KVzip scores by the model's own repetition of the context, got none; "
                "decode with custom_generate=draft_verify, which has it read"
            )
        return states.observed


def repetition_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    start: int,
    stop: int,
    context_tokens: int,
    scale: float | None,
) -> torch.Tensor:
    """float32 ``[kv_heads, stop - start]``: the largest attention of repeating queries to the
    context's tokens ``start .. stop - 1``.

    Args:
        queries: ``[q_heads, new, head_dim]`` of the repetition.
        keys: ``[kv_heads, context_tokens + new, head_dim]``.
        start, stop: the part of the context that is being repeated.
        context_tokens: tokens of the context; keys behind them are the repetition's own.
        scale: attention's scale, None for ``head_dim ** -0.5``.

    The softmax runs over the repeated part, the first tokens and the repetition itself, as in
    KVzip's code, which keeps the cost independent of the context's length.
    """
    heads, total, head_dim = keys.shape
    new = total - context_tokens
    sinks = min(4, start)
    parts = (keys[:, :sinks], keys[:, start:stop], keys[:, context_tokens:])
    chosen = torch.cat(parts, dim=1).float()
    grouped = queries.float().unflatten(0, (heads, -1))
    scale = head_dim**-0.5 if scale is None else scale
    token = torch.arange(new, device=keys.device)
    later = token > token[:, None]
    best: torch.Tensor | None = None
    # A head's group of queries at a time: the products are the largest tensor here.
    for query in grouped.unbind(1):
        logits = query @ chosen.transpose(-1, -2) * scale  # [kv_heads, new, chosen]
        logits[..., -new:].masked_fill_(later, float("-inf"))
        attention = logits.softmax(-1)[..., sinks : sinks + stop - start].amax(-2)
        best = attention if best is None else torch.maximum(best, attention)
    assert best is not None
    return best
