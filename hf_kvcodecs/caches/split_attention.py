"""Attention of a few new tokens over a long history, without a mask and without repeating heads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .attention_view import SDPACall
from .lazy_attention import padding_starts

FROM_TOKENS = 2048  # below, the mask and the repeated heads cost little
MOST_NEW_TOKENS = 512  # their products with each other are held whole


def first_seen(mask: torch.Tensor) -> int | None:
    """The first token that a causal ``mask`` ``[batch, 1, new, tokens]`` with equal padding at the
    left of its rows lets be seen; None for any other mask. Waits for the device."""
    starts = padding_starts(mask)
    if starts is None or (starts.numel() > 1 and bool((starts != starts[0]).any())):
        return None
    return int(starts[0])


def split_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: SDPACall,
    look: Callable[[torch.Tensor], int | None] = first_seen,
) -> torch.Tensor | None:
    """Causal attention ``[batch, q_heads, new, head_dim]`` of the newest tokens, or None where
    this cannot answer.

    A mask makes transformers' sdpa attention repeat keys and values for every query head, which
    takes several times the memory of the layer. Here the history is attended to without one, a
    head's group of queries together, the new tokens among themselves with one, and both are merged
    by the logarithms of their sums of weights.

    Args:
        query: ``[batch, q_heads, new, head_dim]``.
        keys, values: ``[batch, kv_heads, known + new, head_dim]``.
        call: the call to answer; a mask must be causal with padding at the left of its single row.
        look: finds the first token that the call's mask lets be seen, None where this cannot
            answer.
    """
    batch, q_heads, new, head_dim = query.shape
    known = keys.shape[2] - new
    if (
        not 2 <= new <= MOST_NEW_TOKENS
        or known < FROM_TOKENS
        or q_heads % keys.shape[1]
        or head_dim % 8
        or not head_dim == values.shape[3] <= 256
        or call.dropout_p
        or call.is_causal
        or call.attn_mask is None
        or call.attn_mask.shape[1:3] != (1, new)
        or not _has_flash(query, keys, values)
    ):
        return None
    start = look(call.attn_mask)
    if start is None or start >= known:
        return None
    heads = keys.shape[1]
    scale = float(head_dim) ** -0.5 if call.scale is None else call.scale
    rows = query.reshape(batch, heads, -1, head_dim)  # a group's queries, head after head
    past, past_sum = _flash(rows, keys[:, :, start:known], values[:, :, start:known], scale)
    own, own_sum = _among_themselves(query, keys[:, :, known:], values[:, :, known:], scale)
    past = past.reshape(query.shape).float()
    past_sum = past_sum.reshape(batch, q_heads, new, 1)
    total = torch.logaddexp(past_sum, own_sum)
    out = past * (past_sum - total).exp() + own * (own_sum - total).exp()
    return out.to(query.dtype)


def _has_flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    same = query.dtype == keys.dtype == values.dtype
    if query.device.type == "cuda":
        capable = (
            torch.version.hip is None and torch.cuda.get_device_capability(query.device)[0] >= 8
        )
        return capable and same and query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cpu" and same


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask, and the logarithm of each query's sum of weights, float32."""
    if query.device.type == "cuda":
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, False, False, scale=scale
        )[:2]
    else:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, scale=scale
        )[:2]
    # Some kernels round the number of queries up.
    return out, sums[..., : query.shape[2]].float()


def _among_themselves(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention ``[batch, q_heads, new, head_dim]`` of new tokens to each other, and the
    logarithm of the sum ``[batch, q_heads, new, 1]``, both float32."""
    heads, new = keys.shape[1], keys.shape[2]
    grouped = query.unflatten(1, (heads, -1)).float()
    scores = grouped @ keys[:, :, None].float().transpose(-1, -2) * scale
    token = torch.arange(new, device=query.device)
    scores = scores.masked_fill(token > token[:, None], float("-inf"))
    out = scores.softmax(-1) @ values[:, :, None].float()
    return out.flatten(1, 2), scores.logsumexp(-1, keepdim=True).flatten(1, 2)
