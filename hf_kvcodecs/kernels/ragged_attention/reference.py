"""Ragged attention in plain torch, in fp32: what the kernel has to come close to."""

from __future__ import annotations

import torch

from .segments import PackedSegments


def ragged_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    cursor: torch.Tensor,
    scale: float,
    packed: PackedSegments | None = None,
) -> torch.Tensor:
    """See :func:`hf_kvcodecs.kernels.ragged_attention.ragged_attention`; fp32."""
    out = []
    decoded = None if packed is None else decode(packed, q.dtype)
    for head, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        rows = slice(start, start + count + int(cursor) + 1)
        k, v = keys[rows].float(), values[rows].float()
        if packed is not None and decoded is not None:
            first, tokens = int(packed.starts[head]), int(packed.counts[head])
            own = slice(first, first + tokens)
            k, v = torch.cat([decoded[0][own].float(), k]), torch.cat([decoded[1][own].float(), v])
        weights = (q[head].float() @ k.T * scale).softmax(-1)
        out.append(weights @ v)
    return torch.stack(out)


def decode(packed: PackedSegments, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[tokens, head_dim]`` that the codes stand for."""
    codes = _codes(packed.key_words)  # [groups, head_dim, 32]
    keys = codes * packed.key_scale.float()[..., None] + packed.key_minimum.float()[..., None]
    codes = _codes(packed.value_words)  # [tokens, head_dim // 32, 32]
    values = codes * packed.value_scale.float()[..., None] + packed.value_minimum.float()[..., None]
    return keys.transpose(1, 2).flatten(0, 1).to(dtype), values.flatten(1).to(dtype)


def _codes(words: torch.Tensor) -> torch.Tensor:
    """fp32 ``[..., 32]`` of words ``[bits, ...]``."""
    bits = words.shape[0]
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.movedim(0, -1).unsqueeze(-1) >> shifts) & (2**bits - 1)
    numbers: torch.Tensor = codes.flatten(-2).float()
    return numbers
