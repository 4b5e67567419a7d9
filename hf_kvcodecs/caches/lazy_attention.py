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
        or (key.part, value.part) != (0, 1)
        or not source.current
        or dropout_p
        or is_causal
        or (query.requires_grad and torch.is_grad_enabled())
        or query.dim() != 4
    ):
        return None
    batch, heads, q_tokens, head_dim = query.shape
    rows, kv_heads = source.shape(0)[:2]
    if batch != rows or (heads != kv_heads and not enable_gqa):
        return None
    starts = None
    if attn_mask is not None:
        # One row for all queries: a single token's, or several heads' of it (transformers packs
        # grouped queries so).
        wanted = (1, 1, source.tokens)
        if attn_mask.shape[1:] != wanted or attn_mask.shape[0] not in (1, batch):
            return None
        starts = padding_starts(attn_mask)
        if starts is None:
            return None
        starts = starts.expand(batch)
    # Without a causal mask every query sees every token: queries of a head are as good as heads.
    folded = query.reshape(batch, heads * q_tokens, 1, head_dim)
    out: torch.Tensor | None = source.pair.attend(folded, scale, starts)
    return None if out is None else out.reshape(batch, heads, q_tokens, head_dim)


def padding_starts(mask: torch.Tensor) -> torch.Tensor | None:
    """int32 ``[batch]``: the first token that each row sees, if ``mask`` ``[batch, 1, 1, tokens]``
    hides those before it and no other. None for any other mask.

    Waits for the device, once per mask: all layers of a forward pass hand on the same one.
    """
    global _latest_mask
    latest = _latest_mask  # once: other threads set it too
    # Tensors made under inference_mode count no changes: such a mask is looked at each time.
    version = None if mask.is_inference() else mask._version
    if latest is not None and latest[0]() is mask and latest[1] == version:
        return latest[2]
    rows = mask[:, 0, 0]
    if rows.dtype == torch.bool:
        visible, hidden = rows, ~rows
    else:
        visible, hidden = rows == 0, rows <= torch.finfo(rows.dtype).min
    first = hidden.sum(-1, dtype=torch.int32)
    expected = torch.arange(rows.shape[1], device=rows.device) >= first[:, None]
    fits = bool(((visible == expected) & (hidden != expected)).all())
    starts = first if fits else None
    if version is not None:
        _latest_mask = weakref.ref(mask), version, starts
    return starts
