"""Attention in plain torch, in fp32: what the fused kernel has to come close to."""

from __future__ import annotations

import torch


def packed_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`hf_kvcodecs.kernels.packed_attention.packed_attention`, for dense ``keys`` and
    ``values`` ``[batch, kv_heads, tokens, head_dim]``; ``[batch, q_heads, q_tokens, head_dim]`` in
    fp32."""
    batch, q_heads, q_tokens, _ = q.shape
    kv_heads, tokens = keys.shape[1:3]
    k, v = (x.float().repeat_interleave(q_heads // kv_heads, 1) for x in (keys, values))
    scores = q.float() @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    def column(x: torch.Tensor | None, default: int) -> torch.Tensor:
        rows = torch.full((batch,), default, device=q.device) if x is None else x.long()
        return rows[:, None, None]

    length = column(lengths, tokens)
    position = torch.arange(tokens, device=q.device)
    query = length - q_tokens + torch.arange(q_tokens, device=q.device)[:, None]
    seen = (position <= query) & (position >= column(starts, 0))
    if window is not None:
        seen &= position > query - window
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(batch, -1, q_tokens, 1)
        scores = torch.cat([scores, sink], -1)
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)  # a row that sees nothing is zero
    # Tokens that nobody sees do not count, whatever their values: 0 * inf is not 0.
    weights = weights[..., :tokens]
    unseen = ~seen.any(1)[:, None, :, None]
    return weights @ v.masked_fill(unseen, 0.0)
