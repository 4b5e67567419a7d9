"""Ragged attention in plain torch, in fp32: what the kernel has to come close to."""

from __future__ import annotations

import torch


def ragged_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    cursor: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See :func:`hf_kvcodecs.kernels.ragged_attention.ragged_attention`; fp32."""
    out = []
    for head, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        rows = slice(start, start + count + int(cursor) + 1)
        weights = (q[head].float() @ keys[rows].float().T * scale).softmax(-1)
        out.append(weights @ values[rows].float())
    return torch.stack(out)
