"""The rotation in plain torch, on every device."""

from __future__ import annotations

import torch


def angles_between(
    old: torch.Tensor, new: torch.Tensor, inv_freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin float32 ``[tokens, pairs]`` of the rotation from ``old`` to ``new`` positions.

    A model rotates by ``float32(position * inv_freq)``. The difference of these very angles is
    taken in float64: at position 50,000 a float32 angle is off by 0.002, and so is the model's.

    Args:
        old: int64 ``[tokens]``.
        new: int64 ``[tokens]``.
        inv_freq: float32 ``[pairs]``.
    """
    frequencies = inv_freq.float()
    before = (old.float()[:, None] * frequencies).double()
    after = (new.float()[:, None] * frequencies).double()
    difference = after - before
    return difference.cos().float(), difference.sin().float()


def rotate(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, start: int
) -> torch.Tensor:
    """See :func:`hf_kvcodecs.kernels.rotate.rotate`."""
    pairs = cos.shape[-1]
    out = keys.clone(memory_format=torch.contiguous_format)
    if interleaved:
        first, second = slice(start, start + 2 * pairs, 2), slice(start + 1, start + 2 * pairs, 2)
    else:
        first, second = slice(start, start + pairs), slice(start + pairs, start + 2 * pairs)
    x, y = keys[..., first].float(), keys[..., second].float()
    out[..., first] = (x * cos - y * sin).to(keys.dtype)
    out[..., second] = (y * cos + x * sin).to(keys.dtype)
    return out
