"""``scaled_dot_product_attention`` over packed history: what it may be asked, and whether a fused
kernel can answer."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .fused import FusedSnapshot

# How often attention over views was answered by the kernel, and how often from dense tensors.
calls: Counter[str] = Counter()

_Starts = tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None]
_latest_mask: _Starts | None = None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fused_attention(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """The result of an attention call on views of one layer, or None where it has to be computed
    from dense tensors."""
    if func is not F.scaled_dot_product_attention:
        return None
    out = _attend(*args, **kwargs)
    calls["dense" if out is None else "fused"] += 1
    return out


def _attend(
    query: torch.Tensor,
    key: Any,
    value: Any,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    source: object = getattr(key, "source", None)
    if not isinstance(source, FusedSnapshot):
        return None
    same: bool = source is getattr(value, "source", None)
    if (
        not same
        or (key.part, value.part, key.grouped, value.grouped) != (0, 1, False, False)
        or key.repeats != value.repeats
        or not source.current
        or dropout_p
        or is_causal
        or (query.requires_grad and torch.is_grad_enabled())
        or query.dim() != 4
    ):
        return None
    batch, heads, q_tokens, head_dim = query.shape
    rows, kv_heads = source.shape(0)[:2]
    if batch != rows or (heads != kv_heads * key.repeats and not enable_gqa):
        return None
    starts = None
    if attn_mask is not None:
        q_rows = attn_mask.shape[2] if attn_mask.dim() == 4 else 0
        if q_rows not in (1, q_tokens) or attn_mask.shape[0] not in (1, batch):
            return None
        if attn_mask.shape[1] != 1 or attn_mask.shape[3] != source.tokens:
            return None
        starts = padding_starts(attn_mask)
        if starts is None:
            return None
        starts = starts.expand(batch)
        if q_rows > 1:
            return source.pair.attend(query, scale, starts)
    # One row of a mask for all queries, or none: each of them sees what the others see, and queries
    # of a head are as good as heads (transformers packs grouped queries so).
    folded = query.reshape(batch, heads * q_tokens, 1, head_dim)
    out: torch.Tensor | None = source.pair.attend(folded, scale, starts)
    return None if out is None else out.reshape(batch, heads, q_tokens, head_dim)


def padding_starts(mask: torch.Tensor) -> torch.Tensor | None:
    """int32 ``[batch]``: the first token that each row sees, if ``mask`` ``[batch, 1, queries,
    tokens]`` hides those before it, and from all but the last query those that follow its own token
    (the queries are the last tokens). None for any other mask.

    Waits for the device, once per mask: all layers of a forward pass hand on the same one.
    """
    global _latest_mask
    latest = _latest_mask  # once: other threads set it too
    # Tensors made under inference_mode count no changes: such a mask is looked at each time.
    version = None if mask.is_inference() else mask._version
    if latest is not None and latest[0]() is mask and latest[1] == version:
        return latest[2]
    rows = mask[:, 0]  # [batch, queries, tokens]
    if rows.dtype == torch.bool:
        visible, hidden = rows, ~rows
    else:
        visible, hidden = rows == 0, rows <= torch.finfo(rows.dtype).min
    first = hidden[:, -1].sum(-1, dtype=torch.int32)
    token = torch.arange(rows.shape[2], device=rows.device)
    own = token[rows.shape[2] - rows.shape[1] :, None]
    expected = (token >= first[:, None, None]) & (token <= own)
    fits = bool(((visible == expected) & (hidden != expected)).all())
    starts = first if fits else None
    if version is not None:
        _latest_mask = weakref.ref(mask), version, starts
    return starts
